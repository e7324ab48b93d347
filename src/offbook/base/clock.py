"""Wall-clock times whose order and differences survive a change of the system clock, and pauses between the attempts of a request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

JUMP_SECONDS = 1.0
"""Largest difference of the wall clock and the running time between two readings that is no clock change."""
_KEPT = 1_000  # jumps


class Clock:
    """Unix seconds that never go back, with durations that leave out jumps. Thread-safe.

    While the wall clock is behind because it was set back, the times stay ahead of it. A sleep of the machine counts as a
    jump forward.

    >>> wall, running = [100.0], [0.0]
    >>> clock = Clock(lambda: wall[0], lambda: running[0])
    >>> began = clock.now()
    >>> wall[0], running[0] = 105.0 + 86_400, 5.0  # five seconds later; the clock was set forward by a day
    >>> clock.now() - began, clock.since(began)
    (86405.0, 5.0)
    """

    def __init__(
        self, wall: Callable[[], float] = lambda: time.time(), running: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._running = wall, running
        self._lock = threading.Lock()
        self._seen, self._read = wall(), running()
        self._latest = self._seen
        self._ahead = 0.0
        self._jumps: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def now(self) -> float:
        """The current time, at least that of every earlier call."""
        with self._lock:
            wall, running = self._wall(), self._running()
            jump = (wall - self._seen) - (running - self._read)
            self._seen, self._read = wall, running
            if abs(jump) > JUMP_SECONDS:
                ahead = max(self._ahead - jump, 0.0)
                visible = jump - self._ahead + ahead  # what is left of a jump forward
                self._ahead = ahead
                if visible > JUMP_SECONDS:
                    self._jumps.append((wall + ahead, visible))
            self._latest = max(self._latest, wall + self._ahead)
            return self._latest

    def advance(self, moment: float) -> float:
        """Let the times go on from `moment` (Unix seconds) if they are behind it. Returns the seconds by which they were."""
        behind = max(moment - self.now(), 0.0)
        with self._lock:
            if behind:
                self._ahead += behind
                self._latest = max(self._latest, moment)
                self._jumps.append((moment, behind))
        return behind

    def since(self, began: float) -> float:
        """Seconds of running time since a time that `now` returned; at least 0."""
        passed = self.now() - began
        with self._lock:
            return max(passed - sum(jump for moment, jump in self._jumps if moment > began), 0.0)


_process = Clock()


def now() -> float:
    """The current time in Unix seconds. In one process it never goes back."""
    return _process.now()


def advance(moment: float) -> float:
    """Let the times of this process go on from `moment`: see `Clock.advance`."""
    return _process.advance(moment)


def since(began: float) -> float:
    """Seconds since a time that `now` returned in this process, whatever the system clock did meanwhile."""
    return _process.since(began)


def end_of(began: float) -> float:
    """The current time as the end of an interval that began at `began`, so that their difference is its duration."""
    return began + since(began)


class RunningAge:
    """What is older than `seconds` of this process's running time: a sleep of the machine, a set clock and a stop age nothing."""

    def __init__(self, seconds: float, running: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._running = running
        self._readings = deque([(running(), now())])

    def older(self) -> float | None:
        """A time of `now` that lies at least `seconds` of running time ago; None until the process has run so long. Call
        it again and again: each call is a reading."""
        limit = self._running() - self.seconds
        self._readings.append((limit + self.seconds, now()))
        while self._readings[1][0] <= limit:
            self._readings.popleft()
        return self._readings[0][1] if self._readings[0][0] <= limit else None


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
