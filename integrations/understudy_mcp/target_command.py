"""A command that takes a target: its function gets the Target, its line has all the target's options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from .connection.limits import Limits
from .target_options import (
    Bind,
    Env,
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
    """`function(target, ...)` as typer's command: `target` is made from the argument and options of `_options`, which come
    after the function's own."""
    own = list(inspect.signature(function).parameters.values())[1:]
    target, *options = inspect.signature(_options).parameters.values()

    @functools.wraps(function)
    def command(**words: Any) -> None:
        parsed = target_from(**{name: words.pop(name) for name in (target.name, *(each.name for each in options))})
        function(parsed, **words)

    hints = get_type_hints(function, include_extras=True) | get_type_hints(_options, include_extras=True)
    named = [each.replace(annotation=hints[each.name]) for each in (target, *own, *options)]
    command.__annotations__ = {each.name: each.annotation for each in named} | {"return": None}
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
) -> None:
    """The target's options, with their defaults."""
