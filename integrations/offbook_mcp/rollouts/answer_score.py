"""Checks whether a final answer contains the required values."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence

LONGEST_ANSWER = 2_000
"""Only this many characters of an answer count: a model must not score by repeating everything it read."""
_NUMBER = re.compile(r"(?<![\w.,])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")
_TOLERANCE = 1e-6


def answer_score(expected: Sequence[str], answer: str) -> float:
    """The share of the values that the answer contains, from 0 to 1; 1 if no value is required."""
    if not expected:
        return 1.0
    read = answer[:LONGEST_ANSWER]
    return sum(contains(read, value) for value in expected) / len(expected)


def contains(answer: str, value: str) -> bool:
    """Whether the answer contains the value.

    A number matches a number of equal value. A text matches as whole words, ignoring case, white space, quotes and
    backticks.
    """
    wanted = _plain(value)
    if not wanted:
        return True
    if (number := _as_number(wanted)) is not None and any(_close(number, candidate) for candidate in _numbers(answer)):
        return True
    begin = r"(?<!\w)" if wanted[0].isalnum() else ""
    end = r"(?!\w)" if wanted[-1].isalnum() else ""
    if number is not None:  # 5 is not in 0.5, 5.25 or -5
        begin, end = r"(?<![\w.,+-])", r"(?![\w]|[.,]\d)"
    return re.search(begin + re.escape(wanted) + end, _plain(answer)) is not None


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFC", text).casefold()
    return " ".join(re.sub(r"[`\"'*\u2018\u2019\u201c\u201d]", "", text).split())


def _as_number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    return float(match[0].replace(",", "")) if match else None


def _numbers(text: str) -> list[float]:
    return [float(match.replace(",", "")) for match in _NUMBER.findall(text)]


def _close(wanted: float, number: float) -> bool:
    return math.isclose(wanted, number, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
