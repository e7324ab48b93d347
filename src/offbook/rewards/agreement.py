"""Rank agreement of two scorings of the same items. Pure functions of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations


def kendall_tau_b(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b, from -1 to 1: (P - Q) / sqrt((P + Q + T)(P + Q + U)). None if all values of one are equal.

    P pairs have the same order in both, Q the reverse order, T are tied in `first` only, U in `second` only (Kendall
    1945, "The treatment of ties in ranking problems").

    >>> kendall_tau_b([1, 2, 3], [1, 3, 2])  # 2 pairs in the same order, 1 reversed
    0.3333333333333333
    """
    products = [(_sign(a - c), _sign(b - d)) for (a, b), (c, d) in combinations(zip(first, second, strict=True), 2)]
    agreement = sum(x * y for x, y in products)
    ordered = sum(x != 0 for x, _ in products), sum(y != 0 for _, y in products)
    return agreement / math.sqrt(ordered[0] * ordered[1]) if all(ordered) else None


def pairs_in_order(truth: Sequence[float], scores: Sequence[float]) -> tuple[float, int]:
    """(right, pairs): `pairs` is the number of pairs that `truth` orders, and `right` of them have the same order in
    `scores`. A tie in `scores` counts as half, the expected value of a random order."""
    right, pairs = 0.0, 0
    for (a, b), (c, d) in combinations(zip(truth, scores, strict=True), 2):
        if a != c:
            pairs += 1
            right += 0.5 * (1 + _sign(a - c) * _sign(b - d))
    return right, pairs


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
