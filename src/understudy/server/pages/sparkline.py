"""Converts values to the points of an SVG polyline."""

from __future__ import annotations

from collections.abc import Sequence


def points(values: Sequence[float], width: float, height: float, margin: float = 2.0) -> str:
    """The points of a line through the values, scaled to a box; "" for fewer than two values.

    Equal values lie in the middle of the box.

    >>> points([0.0, 1.0], width=24, height=14)
    '2.0,12.0 22.0,2.0'
    """
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    inner = height - 2 * margin
    across = (width - 2 * margin) / (len(values) - 1)

    def y(value: float) -> float:
        return margin + inner * (0.5 if high == low else 1 - (value - low) / (high - low))

    return " ".join(f"{margin + across * index:.1f},{y(value):.1f}" for index, value in enumerate(values))
