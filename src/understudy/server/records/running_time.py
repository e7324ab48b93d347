"""How long a server has run: ages count its running time, whatever the wall clock does meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

JUMP_SECONDS = 5.0
"""By so much the wall clock may drift from the running time between two ticks."""
_KEPT = 1_000


@dataclass
class _Stretch:
    """A time of running during which the wall clock went steadily, in unix seconds."""

    start: float
    end: float


class RunningTime:
    """The stretches of this server's running, also those before a restart. A machine that slept, a clock that was set and
    a server that was down end a stretch."""

    def __init__(
        self,
        stored: str | None = None,
        wall: Callable[[], float] = time.time,
        running: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stored`: what `text` gave before."""
        self._wall, self._running = wall, running
        before: list[list[float]] = json.loads(stored) if stored else []
        self._stretches = [_Stretch(start, end) for start, end in before]
        self._begin()

    def tick(self) -> None:
        """Count the time since the last tick."""
        wall, running = self._wall(), self._running()
        passed = running - self._ticked
        now = self._stretches[-1]
        if abs(wall - now.end - passed) > JUMP_SECONDS:
            now.end += passed
            self._begin()
        else:
            now.end = wall
            self._ticked = running

    def ago(self, seconds: float) -> float:
        """A wall time that lies at least so many seconds of running back: calls that ended earlier are older than that."""
        earliest = self._stretches[-1].end
        left = seconds
        for stretch in reversed(self._stretches):
            length = stretch.end - stretch.start
            earliest = min(earliest, stretch.end - min(length, left))
            left -= length
            if left <= 0:
                return earliest
        return min(earliest, self._stretches[0].start) - left

    def text(self) -> str:
        """To be stored, JSON."""
        return json.dumps([[stretch.start, stretch.end] for stretch in self._stretches])

    def _begin(self) -> None:
        wall = self._wall()
        self._ticked = self._running()
        self._stretches = [*self._stretches[1 - _KEPT :], _Stretch(wall, wall)]
