"""Pauses between the attempts of a request that got no answer."""

from __future__ import annotations

import asyncio
import time


def backoff_seconds(attempt: int, first: float, longest: float) -> float:
    """The pause after an attempt, counted from 1: `first` seconds, doubled each time up to `longest`."""
    return min(longest, first * 2 ** min(attempt - 1, 30))


class Backoff:
    """Repeats a request until `patience` seconds have passed without progress. The pauses are 0.1 s, doubled up to `longest`.

    By hand: tenacity has no deadline that progress renews, and httpx's own retries cover only the connection."""

    def __init__(self, patience: float, *, longest: float = 2.0) -> None:
        self._patience = patience
        self._longest = longest
        self.progress()

    def progress(self) -> None:
        """Something was received: the pauses begin again, and the deadline is `patience` seconds from now."""
        self._attempt = 0
        self.deadline = time.monotonic() + self._patience

    async def wait(self) -> bool:
        """Pause before the next attempt. False, at once, if the pause would end after the deadline."""
        self._attempt += 1
        seconds = backoff_seconds(self._attempt, 0.1, self._longest)
        if time.monotonic() + seconds > self.deadline:
            return False
        await asyncio.sleep(seconds)
        return True
