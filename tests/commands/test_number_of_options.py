"""How many options there are: people read them in help texts and in `docs/options.md`, so each more is a decision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from offbook import plugins
from offbook.base.config import TrainConfig
from offbook.base.server_options import EngineOptions, ServerOptions
from offbook.commands.main import OWN, PLUGGED, loaded
from offbook.commands.serve import WINGS

MAX_OPTIONS = 390
"""Listed options and arguments of all commands, and the fields of the learner, the engines and the server."""


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
    for inner, subcommand in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {inner}", subcommand)


def every_command() -> Iterator[tuple[str, Any]]:
    for name in {**OWN, **dict.fromkeys(plugins.names(PLUGGED))}:
        yield from commands(name, typer.main.get_command(loaded(name)))


def test_the_number_of_options_is_a_decision() -> None:
    listed = {name: len(command.params) for name, command in every_command()}
    fields = {
        model.__name__: len(model.model_fields)
        for model in (TrainConfig, EngineOptions, ServerOptions, *WINGS.values())
    }
    total = sum(listed.values()) + sum(fields.values())
    assert total <= MAX_OPTIONS, f"{total} options: leave one out, or raise MAX_OPTIONS and say why: {listed} {fields}"
    assert max(listed.values()) <= 17, listed
