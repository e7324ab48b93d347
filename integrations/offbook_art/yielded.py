"""ART's trajectories that a coroutine hands out before it ends."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar

from offbook.base.errors import RolloutError
from offbook.base.types import Trajectory

_yielded: ContextVar[list[Trajectory] | None] = ContextVar("offbook_yielded", default=None)


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
