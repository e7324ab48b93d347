"""Text for people: counts with their nouns, and foreign text escaped so that a terminal or a log can show it."""

from __future__ import annotations

import unicodedata

_KEPT = {"\n", "\t", "\u200c", "\u200d"}  # the last two join emoji and letters
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def counted(count: int, noun: str) -> str:
    """A count and a noun whose plural ends in `s`.

    >>> counted(1, "scenario"), counted(1200, "rollout")
    ('1 scenario', '1,200 rollouts')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def printable(text: str) -> str:
    r"""Escape control, format and surrogate characters, so that a text of a tool, model or server cannot control the terminal
    or hide a part of itself.

    `\x1b[2J` is shown as those seven characters. Newlines and tabs stay.
    """
    return "".join(_escaped(char) for char in text)


def one_line(text: str, limit: int = 200) -> str:
    """Like `printable`, on one line of at most `limit` characters."""
    line = printable(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _escaped(char: str) -> str:
    if char in _KEPT or unicodedata.category(char) not in _ESCAPED:
        return char
    return char.encode("unicode_escape").decode("ascii")
