"""The trend of a run's rewards, as a sentence and as the points of an SVG polyline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .numbers import signed

_COMPARED = 5
"""Most rewards on either side of the change."""
_LEAST_DRAWN = 3
"""Fewer rewards are no line worth drawing."""


@dataclass(frozen=True)
class Trend:
    """How the reward moved lately. `change`: the mean of the last `steps` rewards minus the mean of as many before."""

    change: float
    steps: int

    def __str__(self) -> str:
        """The trend as every page and the terminal show it.

        >>> print(Trend(0.25, 1), Trend(-0.125, 5), sep=", ")
        +0.250 in 1 step, −0.125 in 5 steps
        """
        return f"{signed(self.change, 3)} in {self.steps} step{'s' * (self.steps != 1)}"


def trend(rewards: Sequence[float]) -> Trend | None:
    """The trend of the mean rewards of a run's steps, oldest first. It compares at most five with the five before; None
    for fewer than two rewards.

    >>> trend([0.0, 0.5, 1.0, 1.5])
    Trend(change=1.0, steps=2)
    """
    steps = min(_COMPARED, len(rewards) // 2)
    if not steps:
        return None
    return Trend(sum(rewards[-steps:]) / steps - sum(rewards[-2 * steps : -steps]) / steps, steps)


def points(values: Sequence[float], width: float, height: float, margin: float = 2.0) -> str:
    """The points of a line through the values, scaled to a box; "" for fewer than three values.

    Equal values lie in the middle of the box.

    >>> points([0.0, 0.5, 1.0], width=24, height=14)
    '2.0,12.0 12.0,7.0 22.0,2.0'
    """
    if len(values) < _LEAST_DRAWN:
        return ""
    low, high = min(values), max(values)
    inner = height - 2 * margin
    across = (width - 2 * margin) / (len(values) - 1)

    def y(value: float) -> float:
        return margin + inner * (0.5 if high == low else 1 - (value - low) / (high - low))

    return " ".join(f"{margin + across * index:.1f},{y(value):.1f}" for index, value in enumerate(values))
