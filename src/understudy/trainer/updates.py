"""Train requests beside the rollouts of the next steps: one runs at a time, the others wait for it in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
Update = Callable[[], Awaitable[None]]


class Updates:
    """Each update begins when the one before it has ended well; after one that failed none begins."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def under_way(self) -> int:
        """How many run or wait for their turn."""
        return sum(not task.done() and not task.cancelling() for task in self._tasks)

    def add(self, update: Update) -> None:
        """Run it after those that were added before."""
        self._tasks.append(asyncio.create_task(_after(self._tasks[-1] if self._tasks else None, update)))

    async def beside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do this while the updates go on. An update that fails cancels it, waits for its end, and is raised."""
        working = asyncio.create_task(work)
        try:
            while not working.done():
                await asyncio.wait({working, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
                self._take_ended()
            return working.result()
        finally:
            await _cancel([working])

    async def one_ended(self) -> None:
        """Wait for the end of the update that runs; raises what it raises."""
        await asyncio.wait(self._tasks[:1])
        self._take_ended()

    async def all_ended(self) -> None:
        """Wait until none is under way; raises what the first that fails raises."""
        while self._tasks:
            await self.one_ended()

    async def settle(self, error: Exception) -> None:
        """Wait until none is under way, because of this error; it gets a note of an update that fails as well."""
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception) and str(ended) != str(error):
                error.add_note(f"The update under way failed as well: {type(ended).__name__}: {ended}")

    async def cancel(self) -> None:
        """Cancel those under way and wait for their end."""
        await _cancel(self._tasks)

    def _take_ended(self) -> None:
        while self._tasks and self._tasks[0].done():
            ended = self._tasks.pop(0)
            if ended.cancelled() or ended.exception() is not None:
                for waiting in self._tasks:
                    waiting.cancel()
            ended.result()


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
