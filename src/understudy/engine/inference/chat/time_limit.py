"""Work that may take long, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .requests import DialectError

R = TypeVar("R")

PATIENCE_SECONDS = 30.0
"""Longer work is given up: whoever asked for it would not wait, and a health check must never wait for it."""


class Aside:
    """Threads for one kind of work. Waiting for a free one counts for nothing; the work itself has a deadline."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="aside")
        self._free = asyncio.Semaphore(threads)

    async def run(self, work: Callable[[], R], param: str, too_long: str) -> R:
        """What `work` returns. A DialectError that says `too_long` after `PATIENCE_SECONDS`; the thread is free again
        when the work has ended."""
        await self._free.acquire()
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._ended)
        done, _ = await asyncio.wait({future}, timeout=PATIENCE_SECONDS)
        if not done:
            raise DialectError(f"{too_long} (given up after {PATIENCE_SECONDS:.0f} s)", param=param)
        return future.result()

    def _ended(self, future: asyncio.Future[R]) -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # of work that nobody waits for any more
