"""Numbers that a provider, an app or a stored row says, checked before they are counted."""

from __future__ import annotations

import math

MOST_TOKENS = 10**9
"""Tokens of one call at most. No model reads or writes as many."""
MOST_USD = 1e6
"""USD of one call, and of a million tokens, at most."""


def token_count(value: object) -> int | None:
    """A number of tokens: whole, not negative, at most MOST_TOKENS. None for anything else.

    >>> [token_count(value) for value in (7, 7.0, -7, 1.5, 1e308, True, "5")]
    [7, 7, None, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_TOKENS:
        return None
    return int(value) if value == int(value) else None


def usd(value: object) -> float | None:
    """An amount in USD: finite, not negative, at most MOST_USD. None for anything else.

    >>> [usd(value) for value in (0.25, 1, -0.25, float("nan"), 1e308, "1")]
    [0.25, 1.0, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) if 0 <= value <= MOST_USD else None
