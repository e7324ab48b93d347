"""Text of a server, made safe for a terminal and a log."""

from __future__ import annotations

import unicodedata

_KEPT = {"\n", "\t", "\u200c", "\u200d"}  # the last two join emoji and letters
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def printable(text: str) -> str:
    r"""Control, format and surrogate characters as escapes, so that a text cannot steer a terminal or hide a part of itself:
    `\x1b[2J` is shown as those seven characters. Newlines and tabs stay."""
    return "".join(_escaped(char) for char in text)


def one_line(text: str, limit: int = 200) -> str:
    """`printable`, on one line of at most `limit` characters."""
    line = printable(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _escaped(char: str) -> str:
    if char in _KEPT or unicodedata.category(char) not in _ESCAPED:
        return char
    return char.encode("unicode_escape").decode("ascii")
