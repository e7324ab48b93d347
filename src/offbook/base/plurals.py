"""Counts with their nouns, for messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A count and a noun whose plural ends in `s`.

    >>> counted(1, "scenario"), counted(1200, "rollout")
    ('1 scenario', '1,200 rollouts')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"
