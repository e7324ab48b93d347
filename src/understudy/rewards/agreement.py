"""How far two scorings of the same things put them in the same order. Plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations


def kendall_tau_b(first: Sequence[float], second: Sequence[float]) -> float | None:
    """(P - Q) / sqrt((P + Q + T)(P + Q + U)): of all pairs, P have the same order in both, Q the reverse, T are tied in
    `first` only, U in `second` only (Kendall 1945, "The treatment of ties in ranking problems"). From -1 to 1; None where
    either ties all."""
    products = [(_sign(a - c), _sign(b - d)) for (a, b), (c, d) in combinations(zip(first, second, strict=True), 2)]
    agreement = sum(x * y for x, y in products)
    ordered = sum(x != 0 for x, _ in products), sum(y != 0 for _, y in products)
    return agreement / math.sqrt(ordered[0] * ordered[1]) if all(ordered) else None


def pairs_in_order(truth: Sequence[float], scores: Sequence[float]) -> tuple[float, int]:
    """How many of the pairs that `truth` orders `scores` orders alike, and how many it orders. A tie in `scores` counts as
    half a pair: what a toss of a coin would get."""
    right, pairs = 0.0, 0
    for (a, b), (c, d) in combinations(zip(truth, scores, strict=True), 2):
        if a != c:
            pairs += 1
            right += 0.5 * (1 + _sign(a - c) * _sign(b - d))
    return right, pairs


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
