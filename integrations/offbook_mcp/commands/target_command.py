"""The target of `offbook mcp` commands: its argument and options, and a decorator that adds and parses them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.commands.help_pages import more_option
from offbook.trainer.trainable_target import load_object
from offbook_mcp.connection.servers import Limits
from offbook_mcp.connection.target import Target, TargetLike
from offbook_mcp.connection.target_logs import logs_of_command

from .permissions import Permissions

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
Env = Annotated[list[str], more_option(help="environment variable for the command: NAME or NAME=value")]
Fixture = Annotated[Path | None, more_option(help="folder to copy to {rollout_dir} for each rollout")]
Stateless = Annotated[
    bool | None,
    more_option(
        "--stateless/--isolated",
        help="share one server between rollouts, or give each its own  [default: share if every tool is read-only]",
    ),
]
StartTimeout = Annotated[float, more_option(min=0.1, help="seconds to wait for the server to start")]
CallTimeout = Annotated[
    float | None,
    more_option(min=0.1, help="seconds to wait for the answer to a tool call  [default: 60; 5 while exploring]"),
]


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


def on_target(function: Callable[..., None], *, calls_tools: bool = True) -> Callable[..., None]:
    """Turn `function(target, ...)` into a typer command.

    The command takes the target's argument, the function's own options and those of `_target`, and builds the Target. With
    `calls_tools`, a user at a terminal is asked about tools that do not say that they only read.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    target, *options = inspect.signature(_target).parameters.values()

    @functools.wraps(function)
    def command(**words: Any) -> None:
        described = {name: words.pop(name) for name in (target.name, *(option.name for option in options))}
        folder = server_folder(words.get("dir"))
        runs = calls_tools and not words.get("dry_run")
        asks = runs and sys.stdin.isatty() and not described["allow_all"]
        with logs_of_command(folder / "logs" / "mcp.log" if runs else None):
            decide = Permissions(folder / "mcp" / "permissions.json", asks)
            function(replace(_target(**described), decide=decide), **words)

    hints = get_type_hints(function, include_extras=True) | get_type_hints(_target, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = (target, *own, *options)
    named = [parameter.replace(annotation=hints[parameter.name], kind=kind) for parameter in listed]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in named} | {"return": None}
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # read by typer
    return command


def _target(
    target: TargetArgument,
    only: Only = [],  # noqa: B006  # typer reads it
    allow: Allow = [],  # noqa: B006
    allow_all: AllowAll = False,
    deny: Deny = [],  # noqa: B006
    read_only: ReadOnly = False,
    bind: Bind = [],  # noqa: B006
    header: Header = [],  # noqa: B006
    env: Env = [],  # noqa: B006
    fixture: Fixture = None,
    stateless: Stateless = None,
    start_timeout: StartTimeout = Limits().start_seconds,
    call_timeout: CallTimeout = None,
) -> Target:
    """Build the target. Its parameters are the options of every command that takes one. Raises ConfigError."""
    limits = Limits(start_seconds=start_timeout)
    if call_timeout is not None:
        limits = replace(limits, call_seconds=call_timeout, explore_seconds=call_timeout)
    return Target.parse(
        loaded(target),
        headers=pairs(header, ":", "header"),
        env={name: value for name, value in (variable(text) for text in env)},
        only=tuple(only),
        allow=tuple(allow),
        allow_all=allow_all,
        deny=tuple(deny),
        read_only=read_only,
        bind=pairs(bind, "=", "bind"),
        fixture=fixture,
        stateless=stateless,
        limits=limits,
    )
