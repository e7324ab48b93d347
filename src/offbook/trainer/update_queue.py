"""Runs updates (train requests) in the background, one after the other, while the rollouts of the next steps run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
Update = Callable[[], Awaitable[None]]


class UpdateQueue:
    """A queue of updates. An update starts when the previous one has succeeded; after a failure no other starts."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def under_way(self) -> int:
        """Number of updates that run or wait."""
        return sum(not task.done() and not task.cancelling() for task in self._tasks)

    def add(self, update: Update) -> None:
        """Start the update after those added before."""
        self._tasks.append(asyncio.create_task(_after(self._tasks[-1] if self._tasks else None, update)))

    async def beside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` while updates run, and return its result. If an update fails, cancel `work` and raise the update's
        error."""
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await asyncio.wait({working, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                self._take_ended()
            return working.result()
        finally:
            await _cancel([working])

    async def one_ended(self) -> None:
        """Wait until the running update ends. Raises its error."""
        await asyncio.wait(self._tasks[:1])
        self._take_ended()

    async def all_ended(self) -> None:
        """Wait until all updates have ended. Raises the error of the first that fails."""
        while self._tasks:
            await self.one_ended()

    async def settle(self, error: Exception) -> None:
        """Wait until all updates have ended, after `error`. If an update fails too, `error` gets a note about it."""
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception) and str(ended) != str(error):
                error.add_note(f"The update under way failed as well: {type(ended).__name__}: {ended}")

    async def cancel(self) -> None:
        """Cancel all updates and wait until they have ended."""
        await _cancel(self._tasks)

    def _take_ended(self) -> None:
        while self._tasks and self._tasks[0].done():
            ended = self._tasks.pop(0)
            if ended.cancelled() or ended.exception() is not None:
                for waiting in self._tasks:
                    waiting.cancel()
            ended.result()


async def announced(work: Coroutine[Any, Any, Result], cancelled: Callable[[], None]) -> Result:
    """The result of `work`. If it is cancelled, call `cancelled` at once, while `work` still ends."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({working})
        return working.result()
    except asyncio.CancelledError:
        cancelled()
        raise
    finally:
        await _cancel([working])


async def _after(before: asyncio.Task[None] | None, update: Update) -> None:
    if before is not None:
        await asyncio.wait([before])
        if before.cancelled() or before.exception() is not None:
            raise asyncio.CancelledError
    await update()


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
