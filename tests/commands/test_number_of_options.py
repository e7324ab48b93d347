"""How many options there are: people read them in help texts and in `docs/options.md`, so each more is a decision."""

from __future__ import annotations

from offbook.base.config import TrainConfig
from offbook.base.server_options import EngineOptions, ServerOptions
from offbook.commands.serve import WINGS
from tests.paths import ROOT, script

MAX_OPTIONS = 350
"""Listed options and arguments of all commands, and the fields of the learner, the engines and the server."""
MAX_LISTED = 13
"""Listed options and arguments of one command, with `--config` and `--set`."""
PAGE = script(ROOT / "scripts" / "options_page.py")


def test_the_number_of_options_is_a_decision() -> None:
    listed = {name: len(command.params) for name, command in PAGE.commands()}
    models = (TrainConfig, EngineOptions, ServerOptions, *WINGS.values())
    fields = {model.__name__: len(set(model.model_fields) - {"engine", "wings"}) for model in models}
    total = sum(listed.values()) + sum(fields.values())
    assert total <= MAX_OPTIONS, f"{total} options: leave one out, or raise MAX_OPTIONS and say why: {listed} {fields}"
    assert max(listed.values()) <= MAX_LISTED, listed


def test_the_page_has_all_options_that_no_help_lists() -> None:
    lines = PAGE.PAGE.read_text("utf-8").splitlines()
    for row, names in PAGE.rows().items():
        [line] = [line for line in lines if line.startswith(f"{row} | ")]
        commands = line.removeprefix(f"{row} | ").removesuffix(" |").split(", ")
        assert set(names) <= set(commands), "run: python scripts/options_page.py"
