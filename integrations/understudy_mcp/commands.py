"""`understudy mcp ...`: argv -> a target -> one call."""

from __future__ import annotations

import asyncio
import importlib
import json as json_format
import os
import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from understudy.integration import ConfigError

from .limits import Limits
from .pool import ServerPool
from .target import Target, TargetLike
from .tools_page import as_json, lines

app = typer.Typer(
    help="Point at an MCP server: see its tools, and train a model to use them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

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


@app.callback()
def mcp() -> None:
    """Keep `tools` a command of its own while it is the only one."""


@app.command()
def tools(
    target: TargetArgument,
    only: Only = [],  # noqa: B006  # typer reads it
    bind: Bind = [],  # noqa: B006
    header: Header = [],  # noqa: B006
    env: Env = [],  # noqa: B006
    fixture: Fixture = None,
    stateless: Stateless = None,
    resources: Resources = False,
    prompts: Prompts = False,
    start_timeout: StartTimeout = Limits().start_seconds,
    json: Annotated[bool, typer.Option("--json", help="as JSON, with the schemas that the model gets")] = False,
) -> None:
    """Start the server and list its tools, as the model will see them."""
    parsed = Target.parse(
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
    typer.echo(asyncio.run(listing(parsed, json)))


async def listing(target: Target, json: bool) -> str:
    """The page of `understudy mcp tools`."""
    async with ServerPool(target, ahead=0) as pool:
        return json_format.dumps(as_json(pool), indent=1) if json else "\n".join(lines(pool))


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
