"""Measures how long a server has run. Ages of calls count this running time, not the wall clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

JUMP_SECONDS = 5.0
"""Largest difference of wall clock and running time between two ticks that is not taken for a clock change."""
_KEPT = 1_000  # intervals


@dataclass
class _Interval:
    """An interval of running without a clock change, in unix seconds."""

    start: float
    end: float


class RunningTime:
    """The intervals in which the server ran, including those before a restart.

    An interval ends if the server stops, the machine sleeps, or the clock is set.
    """

    def __init__(
        self,
        stored: str | None = None,
        wall: Callable[[], float] = time.time,
        running: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stored` is an earlier result of `text`. `wall` and `running` are the clocks, in seconds."""
        self._wall, self._running = wall, running
        before: list[list[float]] = json.loads(stored) if stored else []
        self._intervals = [_Interval(start, end) for start, end in before]
        self._begin()

    def tick(self) -> None:
        """Add the time since the last tick."""
        wall, running = self._wall(), self._running()
        passed = running - self._ticked
        now = self._intervals[-1]
        if abs(wall - now.end - passed) > JUMP_SECONDS:
            now.end += passed
            self._begin()
        else:
            now.end = wall
            self._ticked = running

    def ago(self, seconds: float) -> float:
        """A wall-clock time at least this many seconds of running ago. Calls that ended before it are older than that.

        The server ran from 0 to 100 and from 500 to 550, and has just been started at 1000. 60 s of running before that
        are the 50 s up to 550 and the 10 s up to 100:

        >>> RunningTime("[[0, 100], [500, 550]]", wall=lambda: 1000.0, running=lambda: 0.0).ago(60.0)
        90.0
        """
        earliest = self._intervals[-1].end
        missing = seconds
        for interval in reversed(self._intervals):
            length = interval.end - interval.start
            earliest = min(earliest, interval.end - min(length, missing))
            missing -= length
            if missing <= 0:
                return earliest
        return min(earliest, self._intervals[0].start) - missing

    def text(self) -> str:
        """The intervals as JSON, to be stored."""
        return json.dumps([[interval.start, interval.end] for interval in self._intervals])

    def _begin(self) -> None:
        wall = self._wall()
        self._ticked = self._running()
        self._intervals = [*self._intervals[1 - _KEPT :], _Interval(wall, wall)]
