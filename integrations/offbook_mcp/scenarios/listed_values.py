"""Finds the values that a description or an error message lists, such as `Known cities: Paris, Oslo`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .harvest import usable_value, words_of

_LONGEST_TEXT = 4_000
_OPENING = r"(?:one of|any of|either|e\.g\.|for example|such as|choose from)(?![\w])[:,]?"
_START = re.compile(
    rf"(?<![\w-])(?:(?P<label>[A-Za-z][\w-]*(?: [\w-]+){{0,3}})(?::|(?<=\w) are)\s+(?:(?:must be |is )?{_OPENING}\s*)?|{_OPENING}\s+)",
    re.IGNORECASE,
)
_END = re.compile(r"[\])}\n]|[.;](?=\s|$)|\s\(")
_BETWEEN = re.compile(r"\s*[,|]\s*(?:(?:and|or)\s+)?|\s+(?:and|or)\s+")
_QUOTED = re.compile(r"""(["'`])(?P<text>[^"'`\n]{1,40})\1""")
_BARE = re.compile(
    rf"(?!(?:the|a|an|this|its?|{_OPENING})\s)(?P<text>[\w@/+-][\w@/+.:-]*(?: [\w@/+.:-]+){{0,2}})", re.IGNORECASE
)
_ARGUMENT = re.compile(
    r"^[ \t]*(?:[-*][ \t]+)?[`'\"]?(?P<name>\w+)[`'\"]?[ \t]*(?:\([^)\n]*\))?:[ \t]*(?P<about>.+)$", re.MULTILINE
)


@dataclass(frozen=True)
class ListedValues:
    """A list in a text. `label` has the words before it, singular: ("known", "city"); () if it has none."""

    label: tuple[str, ...]
    values: tuple[str, ...]


def lists_in(text: str) -> Iterator[ListedValues]:
    """The lists of at least two short values after a label with a colon, or after words such as `one of` and `e.g.`.

    >>> [listed.values for listed in lists_in("unknown table 'x'; tables: users, orders")]
    [('users', 'orders')]
    """
    text = text[:_LONGEST_TEXT]
    place = 0
    while start := _START.search(text, place):
        place = start.end()
        begin = place + (text[place : place + 1] in ("[", "(", "{"))
        end = _END.search(text, begin)
        values = _values(text[begin : end.start() if end else len(text)])
        if len(values) > 1:
            yield ListedValues(words_of(start["label"] or ""), values)


def values_for(name: str, about: str, tool_description: str) -> list[str]:
    """The values that an argument's own description lists, and those that the tool's description lists under its name."""
    own = [about, *(line["about"] for line in _ARGUMENT.finditer(tool_description) if line["name"] == name)]
    last = words_of(name)[-1:]
    named = (listed for listed in lists_in(tool_description) if last and listed.label[-1:] == last)
    return _distinct([*(listed for text in own for listed in lists_in(text)), *named])


def _values(text: str) -> tuple[str, ...]:
    """The values of a list; () if one of them is no short value, as in a sentence."""
    values: list[str] = []
    for piece in _BETWEEN.split(text.strip().rstrip(".;")):
        match = _QUOTED.fullmatch(piece) or _BARE.fullmatch(piece)
        if match is None or usable_value(match["text"]) != match["text"]:
            return ()
        values.append(match["text"])
    return tuple(dict.fromkeys(values))


def _distinct(lists: Iterable[ListedValues]) -> list[str]:
    return list(dict.fromkeys(value for listed in lists for value in listed.values))
