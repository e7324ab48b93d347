"""A decorator for commands that take a target: it adds the target's options and parses them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from .connection.limits import Limits
from .target_options import (
    Bind,
    CallTimeout,
    Env,
    ExploreTimeout,
    Fixture,
    Header,
    Only,
    Prompts,
    Resources,
    StartTimeout,
    Stateless,
    TargetArgument,
    target_from,
)


def on_target(function: Callable[..., None]) -> Callable[..., None]:
    """Turn `function(target, ...)` into a typer command.

    The command takes the target's argument, the function's own options and those of `_options`, and builds the Target.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    target, *options = inspect.signature(_options).parameters.values()

    @functools.wraps(function)
    def command(**words: Any) -> None:
        parsed = target_from(**{name: words.pop(name) for name in (target.name, *(option.name for option in options))})
        function(parsed, **words)

    hints = get_type_hints(function, include_extras=True) | get_type_hints(_options, include_extras=True)
    named = [parameter.replace(annotation=hints[parameter.name]) for parameter in (target, *own, *options)]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in named} | {"return": None}
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # read by typer
    return command


def _options(
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
    call_timeout: CallTimeout = Limits().call_seconds,
    explore_timeout: ExploreTimeout = Limits().explore_seconds,
) -> None:
    """The target's options, with their defaults."""
