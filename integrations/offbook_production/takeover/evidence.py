"""Whether the small model's scores are worse than the paid model's: the interval of the difference of two means.

The interval is Agresti and Caffo's ("Simple and effective confidence intervals for proportions and differences of proportions",
The American Statistician 54, 2000) for scores in [0, 1] in place of successes: each side gets one score of 0 and one of 1 more,
so that equal scores are no certainty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Z = 1.96
"""Standard errors on each side of a 95 % interval."""


@dataclass(frozen=True)
class ScoreSums:
    """The number of scores in [0, 1], their sum, and that of their squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, score: float) -> ScoreSums:
        """With one more score."""
        return ScoreSums(self.count + 1, self.total + score, self.squares + score * score)

    @property
    def mean(self) -> float | None:
        """None without scores."""
        return self.total / self.count if self.count else None


def interval(tested: ScoreSums, reference: ScoreSums) -> tuple[float, float]:
    """The 95 % interval of the difference of the means, tested - reference.

    >>> low, high = interval(ScoreSums(100, 92, 92), ScoreSums(900, 828, 828))
    >>> round(low, 3), round(high, 3)
    (-0.065, 0.051)
    """
    means, error = list[float](), 0.0
    for scores in (tested, reference):
        number = scores.count + 2
        mean = (scores.total + 1) / number
        means.append(mean)
        error += max(0.0, (scores.squares + 1) / number - mean * mean) / number
    room = Z * math.sqrt(error)
    return means[0] - means[1] - room, means[0] - means[1] + room


@dataclass
class Evidence:
    """The scores of a takeover. First the small and the paid model's count until each has `threads`; then all threads are the small
    model's, whose scores count by `threads` at a time, against the same scores of the paid model."""

    threads: int
    small: ScoreSums = field(default_factory=ScoreSums)
    paid: ScoreSums = field(default_factory=ScoreSums)
    watched: ScoreSums = field(default_factory=ScoreSums)

    @property
    def complete(self) -> bool:
        """Whether each side has enough scores."""
        return min(self.small.count, self.paid.count) >= self.threads

    def add(self, score: float, *, small: bool, watched: bool) -> None:
        """Take in the first score of a thread, in [0, 1]. `watched`: the thread began after the small model took over."""
        if watched and small:
            begun = self.watched if self.watched.count < self.threads else ScoreSums()
            self.watched = begun.plus(score)
        elif not watched and not self.complete:
            self.small, self.paid = (
                (self.small.plus(score), self.paid) if small else (self.small, self.paid.plus(score))
            )
