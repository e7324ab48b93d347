"""The argument and options of `offbook mcp` commands that describe the target, and their conversion to a Target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from offbook.base.errors import ConfigError
from offbook.commands.help_pages import more_option
from offbook.trainer.trainable_target import load_object
from offbook_mcp.connection.limits import Limits
from offbook_mcp.connection.target import Decide, Target, TargetLike

TargetArgument = Annotated[
    str, typer.Argument(help="MCP server: a command in quotes, a URL, an mcp.json, or module:name of a server object")
]
Only = Annotated[list[str], more_option(help="use only this tool; repeatable")]
Allow = Annotated[list[str], typer.Option(help="call this tool although it may write (remembered); repeatable")]
AllowAll = Annotated[bool, more_option("--allow-all", help="call all tools, except those that may show secrets")]
Deny = Annotated[list[str], more_option(help="never call or show this tool (remembered); repeatable")]
ReadOnly = Annotated[bool, more_option("--read-only", help="declare that all tools of the server only read")]
Bind = Annotated[
    list[str],
    more_option(help="set a tool's argument (argument=value) and hide it from the model; may use {rollout_dir}"),
]
Header = Annotated[list[str], more_option(help="HTTP header, 'Name: value'; may use ${env:TOKEN}")]
Env = Annotated[list[str], typer.Option(help="environment variable for the command: NAME or NAME=value")]
Fixture = Annotated[Path | None, more_option(help="folder to copy to {rollout_dir} for each rollout")]
Stateless = Annotated[
    bool | None,
    more_option(
        "--stateless/--isolated",
        help="share one server between rollouts, or give each its own  [default: share if every tool is read-only]",
    ),
]
StartTimeout = Annotated[float, more_option(min=0.1, help="seconds to wait for the server to start")]
CallTimeout = Annotated[float, more_option(min=0.1, help="seconds to wait for the answer to a tool call")]
ExploreTimeout = Annotated[
    float, more_option(min=0.1, help="seconds to wait for a call while exploring; a slower tool is left out")
]


def target_from(
    target: str,
    *,
    only: list[str],
    allow: list[str],
    allow_all: bool,
    deny: list[str],
    read_only: bool,
    bind: list[str],
    header: list[str],
    env: list[str],
    fixture: Path | None,
    stateless: bool | None,
    start_timeout: float,
    call_timeout: float,
    explore_timeout: float,
    decide: Decide,
) -> Target:
    """Build the target from the command line's options. Raises ConfigError."""
    return Target.parse(
        loaded(target),
        headers=pairs(header, ":", "header"),
        env={name: value for name, value in (variable(text) for text in env)},
        only=tuple(only),
        allow=tuple(allow),
        allow_all=allow_all,
        deny=tuple(deny),
        read_only=read_only,
        decide=decide,
        bind=pairs(bind, "=", "bind"),
        fixture=fixture,
        stateless=stateless,
        limits=Limits(start_seconds=start_timeout, call_seconds=call_timeout, explore_seconds=explore_timeout),
    )


def loaded(target: str) -> TargetLike:
    """Import the object named `module:name`, also from the current folder. Returns any other text unchanged.

    Raises ConfigError when the module or the name does not exist.
    """
    module, colon, name = target.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        return target
    return cast(TargetLike, load_object(target))  # `Target.parse` rejects other types


def pairs(texts: list[str], separator: str, option: str) -> dict[str, str]:
    """Parse `name=value` texts to a mapping. Raises ConfigError."""
    mapping: dict[str, str] = {}
    for text in texts:
        name, mark, value = text.partition(separator)
        if not mark or not name.strip():
            raise ConfigError(f"--{option}: {text!r} is not of the form name{separator}value")
        mapping[name.strip()] = value.strip()
    return mapping


def variable(text: str) -> tuple[str, str]:
    """Parse `NAME=value`. `NAME` alone becomes a reference to this process's variable, so that its value is not recorded."""
    name, equals, value = text.partition("=")
    return name, value if equals else f"${{env:{name}}}"
