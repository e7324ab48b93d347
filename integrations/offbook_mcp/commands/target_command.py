"""A decorator for commands that take a target: it adds the target's options and parses them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

from offbook.base.server_options import server_folder
from offbook_mcp.connection.limits import Limits
from offbook_mcp.connection.target_logs import logs_of_command

from .permissions import Permissions
from .target_options import (
    Allow,
    AllowAll,
    Bind,
    CallTimeout,
    Deny,
    Env,
    ExploreTimeout,
    Fixture,
    Header,
    Only,
    ReadOnly,
    StartTimeout,
    Stateless,
    TargetArgument,
    target_from,
)


def on_target(function: Callable[..., None], *, calls_tools: bool = True) -> Callable[..., None]:
    """Turn `function(target, ...)` into a typer command.

    The command takes the target's argument, the function's own options and those of `_options`, and builds the Target. With
    `calls_tools`, a user at a terminal is asked about tools that do not say that they only read.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    target, *options = inspect.signature(_options).parameters.values()

    @functools.wraps(function)
    def command(**words: Any) -> None:
        described = {name: words.pop(name) for name in (target.name, *(option.name for option in options))}
        folder = server_folder(words.get("dir"))
        runs = calls_tools and not words.get("dry_run")
        asks = runs and sys.stdin.isatty() and not described["allow_all"]
        with logs_of_command(folder / "logs" / "mcp.log" if runs else None):
            decide = Permissions(folder / "mcp" / "permissions.json", asks)
            function(target_from(**described, decide=decide), **words)

    hints = get_type_hints(function, include_extras=True) | get_type_hints(_options, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = (target, *own, *options)
    named = [parameter.replace(annotation=hints[parameter.name], kind=kind) for parameter in listed]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in named} | {"return": None}
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # read by typer
    return command


def _options(
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
    call_timeout: CallTimeout = Limits().call_seconds,
    explore_timeout: ExploreTimeout = Limits().explore_seconds,
) -> None:
    """The target's options, with their defaults."""
