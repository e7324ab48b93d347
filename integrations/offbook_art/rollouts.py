"""ART's functions around a rollout: repeated after an error, limited in number at once, and its trajectory before it ends."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import time
from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from offbook.base.errors import ConfigError, RolloutError
from offbook.base.option_names import names_checked
from offbook.base.types import Trajectory

P = ParamSpec("P")
R = TypeVar("R")
Errors = type[BaseException] | tuple[type[BaseException], ...]
OnRetry = Callable[[BaseException, int], object]

_yielded: ContextVar[list[Trajectory] | None] = ContextVar("offbook_yielded", default=None)


@names_checked("retry")
def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: Errors = Exception,
    on_retry: OnRetry | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that calls a sync or async function up to `max_attempts` times.

    The first pause is `delay` seconds, and every further one `backoff_factor` times longer. `on_retry(error, attempt)` is
    called before another attempt. The last error is raised unchanged. A cancellation is never retried. Raises ConfigError
    for a number out of range.
    """
    if max_attempts < 1 or delay < 0 or backoff_factor <= 0:
        raise ConfigError(
            "retry: max_attempts must be at least 1, delay at least 0 and backoff_factor above 0; got "
            f"{max_attempts!r}, {delay!r}, {backoff_factor!r}"
        )

    def pause(error: BaseException, attempt: int) -> float:
        if attempt == max_attempts:
            raise error
        if on_retry is not None:
            on_retry(error, attempt)
        return delay * backoff_factor ** (attempt - 1)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):
            return cast(Callable[P, R], _again_async(function, exceptions, pause))
        return _again(function, exceptions, pause)

    return decorate


def _again(
    function: Callable[P, R], exceptions: Errors, pause: Callable[[BaseException, int], float]
) -> Callable[P, R]:
    @functools.wraps(function)
    def again(*args: P.args, **kwargs: P.kwargs) -> R:
        for attempt in itertools.count(1):
            try:
                return function(*args, **kwargs)
            except exceptions as error:
                time.sleep(pause(error, attempt))
        raise AssertionError("unreachable")

    return again


def _again_async(
    function: Callable[P, Awaitable[R]], exceptions: Errors, pause: Callable[[BaseException, int], float]
) -> Callable[P, Awaitable[R]]:
    @functools.wraps(function)
    async def again(*args: P.args, **kwargs: P.kwargs) -> R:
        for attempt in itertools.count(1):
            try:
                return await function(*args, **kwargs)
            except asyncio.CancelledError:
                raise
            except exceptions as error:
                await asyncio.sleep(pause(error, attempt))
        raise AssertionError("unreachable")

    return again


def limit_concurrency(
    n: int, derive_key: Callable[..., Hashable] | None = None
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorator that lets at most `n` calls of an async function run at once in one event loop.

    With `derive_key`, called with the same arguments, the limit applies per key. Raises ConfigError for `n` below 1.
    """
    if n < 1:
        raise ConfigError(f"limit_concurrency: n must be at least 1, got {n!r}")

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, asyncio.Semaphore]] = WeakKeyDictionary()

        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            key = derive_key(*args, **kwargs) if derive_key is not None else None
            semaphores = by_loop.setdefault(asyncio.get_running_loop(), {})
            async with semaphores.setdefault(key, asyncio.Semaphore(n)):
                return await function(*args, **kwargs)

        return limited

    return decorate


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand the trajectory to the enclosing `capture_yielded_trajectory`; outside of one it does nothing."""
    trajectories = _yielded.get()
    if trajectories is not None:
        trajectories.append(trajectory)


async def capture_yielded_trajectory(coroutine: Awaitable[object]) -> Trajectory:
    """Run a coroutine and return the trajectory that it yielded, the last of several. Raises RolloutError for none."""
    trajectories: list[Trajectory] = []
    token = _yielded.set(trajectories)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not trajectories:
        raise RolloutError("no trajectory was yielded: call yield_trajectory(trajectory) inside the coroutine")
    return trajectories[-1]
