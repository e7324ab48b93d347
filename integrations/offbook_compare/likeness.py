"""How much two texts are alike: the Jaccard similarity of their shingles."""

from __future__ import annotations

import re

SHINGLE = 3
"""Number of consecutive words that are compared."""
NEARLY_EQUAL = 0.8
"""Similarity from which two texts count as equal."""


def plain_words(text: str) -> str:
    """The words of a text in lower case, joined by one space."""
    return " ".join(re.findall(r"\w+", text.lower()))


def shingles(text: str) -> frozenset[str]:
    """The runs of `SHINGLE` consecutive words; a shorter text is one run.

    >>> sorted(shingles("Where is box 4821?"))
    ['is box 4821', 'where is box']
    """
    words = plain_words(text).split()
    return frozenset(" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1)))


def jaccard(own: frozenset[str], other: frozenset[str]) -> float:
    """The share of shingles that both have, from 0 to 1.

    >>> jaccard(shingles("please sort the red boxes"), shingles("please sort the red lids"))
    0.5
    """
    together = len(own | other)
    return len(own & other) / together if together else 0.0
