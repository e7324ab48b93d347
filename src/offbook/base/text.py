"""Text for people: counts with their nouns, and foreign text escaped so that a terminal or a log can show it."""

from __future__ import annotations

import unicodedata

_KEPT = {"\n", "\t", "\u200c", "\u200d"}  # the last two join emoji and letters
_ESCAPED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


CLOSE_NAME = 0.75
"""Similarity, as `difflib` measures it, from which a known name is suggested for an unknown one: at its default of 0.6, `foo`
is like `offbook`."""
_ASCII = dict(zip("▁▂▃▄▅▆▇█✓✔✕✗●○↻·−–—’“”⟨⟩", '_.-:=+*#++xx*oo.---\'""<>', strict=True)) | {"…": "..."}  # noqa: RUF001
"""What stands for the characters of our own tables and messages where an encoding has none."""


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


def encodable(text: str, encoding: str | None) -> str:
    r"""The text as an encoding can express it: other characters become similar ones of ASCII, or escapes.

    >>> encodable("✓ Zoë Ł", "latin-1")
    '+ Zoë \\u0141'
    """
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        fits = {char: char.encode(encoding, "ignore") != b"" for char in set(text)}
        return "".join(char if fits[char] else _ASCII.get(char, _escape(char)) for char in text)
    return text


def one_line(text: str, limit: int = 200) -> str:
    """Like `printable`, on one line of at most `limit` characters."""
    line = printable(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _escaped(char: str) -> str:
    if char in _KEPT or unicodedata.category(char) not in _ESCAPED:
        return char
    return _escape(char)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def word_list(text: str) -> list[str]:
    """The words of a long list, written as a text."""
    return text.split()
