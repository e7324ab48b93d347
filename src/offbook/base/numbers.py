"""Numbers that come from outside, checked before they are counted, and rewards compared up to rounding."""

from __future__ import annotations

import math
from collections.abc import Collection

RELATIVE = 1e-6
"""Rounding of a reward, relative to the largest of its group: 8 units in the last place of float32. It covers a float32
beside a Python float, and sums of some of them."""
ABSOLUTE = 1e-12
"""Rounding of a reward that is a difference of larger numbers, such as 0.1 + 0.2 - 0.3."""


def rounding(values: Collection[float]) -> float:
    """The largest difference between two of these finite values that rounding explains."""
    return max(RELATIVE * max(map(abs, values), default=0.0), ABSOLUTE)


def distinct(values: Collection[float]) -> list[float]:
    """The finite values in ascending order, without those that equal the last one kept up to rounding.

    >>> distinct([0.2, 0.1, 0.10000000149, 0.1])
    [0.1, 0.2]
    """
    kept: list[float] = []
    allowed = rounding(values)
    for value in sorted(values):
        if not kept or value - kept[-1] > allowed:
            kept.append(value)
    return kept


def reaches(value: float, least: float) -> bool:
    """Whether a finite value is at least `least`, up to rounding.

    >>> reaches(sum([0.1] * 10), 1.0), reaches(0.9, 1.0)
    (True, False)
    """
    return value >= least - rounding((value, least))


MAX_CALL_TOKENS = 10**9
"""Tokens of one call at most. No model reads or writes as many."""
MAX_USD = 1e6
"""USD of one call, and of a million tokens, at most."""


def token_count(value: object) -> int | None:
    """A number of tokens: whole, not negative, at most MAX_CALL_TOKENS. None for anything else.

    >>> [token_count(value) for value in (7, 7.0, -7, 1.5, 1e308, True, "5")]
    [7, 7, None, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_CALL_TOKENS:
        return None
    return int(value) if value == int(value) else None


def usd(value: object) -> float | None:
    """An amount in USD: finite, not negative, at most MAX_USD. None for anything else.

    >>> [usd(value) for value in (0.25, 1, -0.25, float("nan"), 1e308, "1")]
    [0.25, 1.0, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value <= MAX_USD else None
