"""Runs long work in threads, with a time limit, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .requests import DialectError

R = TypeVar("R")

PATIENCE_SECONDS = 30.0
"""Time limit of one piece of work. Its client would not wait longer."""


class TimeLimitedPool:
    """A pool of threads with a time limit. The time spent waiting for a free thread does not count."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="time-limited")
        self._free = asyncio.Semaphore(threads)

    async def run(self, work: Callable[[], R], param: str, too_long: str) -> R:
        """Run `work` in a thread, and return its result.

        Raises DialectError with the message `too_long` after `PATIENCE_SECONDS`. The thread stays busy until `work` ends.
        """
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
            future.exception()  # retrieved, so that asyncio does not log it as unhandled
