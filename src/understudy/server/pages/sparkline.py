"""A small line of the last values, as the points of an SVG polyline."""

from __future__ import annotations

from collections.abc import Sequence


def points(values: Sequence[float], width: float, height: float, margin: float = 2.0) -> str:
    """`x,y x,y ...` inside a box; a flat line runs through its middle; "" for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    inner = height - 2 * margin
    across = (width - 2 * margin) / (len(values) - 1)

    def y(value: float) -> float:
        return margin + inner * (0.5 if high == low else 1 - (value - low) / (high - low))

    return " ".join(f"{margin + across * at:.1f},{y(value):.1f}" for at, value in enumerate(values))
