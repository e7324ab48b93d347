"""The target and its options as `understudy mcp ...` takes them, the same for every command."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from understudy.integration import ConfigError

from .connection.limits import Limits
from .connection.target import Target, TargetLike

TargetArgument = Annotated[
    str, typer.Argument(help="a command in quotes, a URL, an mcp.json, or module:name of a server object")
]
Only = Annotated[list[str], typer.Option(help="use this tool only (repeat for more)")]
Bind = Annotated[
    list[str], typer.Option(help="argument=value, fixed and hidden from the model; {rollout_dir} is replaced")
]
Header = Annotated[list[str], typer.Option(help="header of a URL, as 'Name: value'; ${env:TOKEN} is replaced")]
Env = Annotated[list[str], typer.Option(help="variable to pass on to the command: NAME, or NAME=value")]
Fixture = Annotated[Path | None, typer.Option(help="folder that each rollout's {rollout_dir} is a copy of")]
Stateless = Annotated[
    bool | None, typer.Option("--stateless/--isolated", help="share one server, or give each rollout its own")
]
Resources = Annotated[bool, typer.Option("--resources", help="offer the server's resources as tools")]
Prompts = Annotated[bool, typer.Option("--prompts", help="offer the server's prompts as tools")]
StartTimeout = Annotated[float, typer.Option(min=0.1, help="seconds until the server is ready")]


def target_from(
    target: str,
    *,
    only: list[str],
    bind: list[str],
    header: list[str],
    env: list[str],
    fixture: Path | None,
    stateless: bool | None,
    resources: bool,
    prompts: bool,
    start_timeout: float,
) -> Target:
    """The target that these options describe. Raises ConfigError."""
    return Target.parse(
        loaded(target),
        headers=pairs(header, ":", "header"),
        env={name: value for name, value in (variable(each) for each in env)},
        only=tuple(only),
        bind=pairs(bind, "=", "bind"),
        fixture=fixture,
        stateless=stateless,
        resources=resources,
        prompts=prompts,
        limits=Limits(start_seconds=start_timeout),
    )


def loaded(target: str) -> TargetLike:
    """The object that `module:name` names, looked for in the current folder too; any other text stays. Raises ConfigError."""
    module, colon, name = target.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        return target
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        place: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ConfigError(f"target: there is no module {error.name!r}") from error
    for part in name.split("."):
        if not hasattr(place, part):
            raise ConfigError(f"target: {module} has no {name!r}")
        place = getattr(place, part)
    return cast(TargetLike, place)  # `Target.parse` refuses what is none


def pairs(texts: list[str], separator: str, option: str) -> dict[str, str]:
    """`name=value` texts as a mapping. Raises ConfigError."""
    mapping: dict[str, str] = {}
    for text in texts:
        name, mark, value = text.partition(separator)
        if not mark or not name.strip():
            raise ConfigError(f"--{option}: {text!r} is not of the form name{separator}value")
        mapping[name.strip()] = value.strip()
    return mapping


def variable(text: str) -> tuple[str, str]:
    """`NAME=value`, or `NAME` as a reference to this process's variable: its value is not recorded."""
    name, equals, value = text.partition("=")
    return name, value if equals else f"${{env:{name}}}"
