"""How late the event loop is: the time for which one request kept all others waiting."""

from __future__ import annotations

import asyncio
import time
from collections import deque

TICK_SECONDS = 0.05
KEPT = 1_200
"""Ticks that are looked back at: a minute."""


class LoopLag:
    """Lags of the last minute, in seconds, once `watch` runs."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=KEPT)

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            self._lags.append(time.perf_counter() - before - TICK_SECONDS)

    def p99(self) -> float:
        """The lag that 99 of 100 ticks did not exceed; 0 before the first."""
        lags = sorted(self._lags)
        return max(0.0, lags[int(0.99 * (len(lags) - 1))]) if lags else 0.0
