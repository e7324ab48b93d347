"""Extracts values from texts: from tool results with their place, and from lists in descriptions and errors."""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from itertools import islice
from typing import TypeAlias, cast

from offbook_mcp.connection.servers import ROLLOUT_DIR
from offbook_mcp.tools.result_values import scalars_of
from offbook_mcp.tools.rollout_tools import ToolResult
from offbook_mcp.tools.tool import is_verb

Scalar: TypeAlias = str | int | float | bool

LONGEST_VALUE = 63
"""Arguments stay below 64 characters: a small policy copies them character by character."""
_MAX_LEAVES = 400
_MAX_READ = 2_000
"""Values of a result that are looked at: the words of a new name take a millisecond."""
_DEEPEST = 8
_LABELLED = re.compile(r"\**([^\W\d_][\w /-]{0,30}?)\**:\** +(.+)")
_MARKED = re.compile(r"\[([A-Za-z]+)\] +(.+)")
_BULLET = re.compile(r"(?:[-*+•]|(?<!\d)\d+[.)])\s+")
_WRAPPERS = {"result", "content", "text"}


@dataclass(frozen=True)
class Leaf:
    """One value of a tool result.

    `place` is the tool and the path, such as "read_graph: entities[].name"; `words` are the words of the path.
    `context` has the texts of the call's arguments.
    """

    value: Scalar
    place: str
    words: tuple[str, ...]
    context: frozenset[str] = frozenset()


def words_of(name: str) -> tuple[str, ...]:
    """Split a name into lower-case singular words: `entityNames` -> ("entity", "name")."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return tuple(singular(word.lower()) for word in re.findall(r"[^\W\d_]+|\d+", spaced))


@lru_cache(maxsize=10_000)
def singular(word: str) -> str:
    """The singular of an English word: `entities` -> `entity`, `people` -> `person`. A word that is none stays."""
    if len(word) < 4 or word.endswith(("ss", "us", "is")) or not word.isascii():
        return word
    return str(_singular_noun()(word) or word)


@cache
def _singular_noun() -> Callable[[str], str | bool]:
    """`inflect` takes a second to import, so it is imported when the first word needs it."""
    return cast(Callable[[str], str | bool], importlib.import_module("inflect").engine().singular_noun)


def leaves_of(tool: str, arguments: Mapping[str, object], result: ToolResult) -> tuple[Leaf, ...]:
    """The values of a result that could be arguments of other calls.

    Values that repeat an argument are left out, and those that the model does not see since the result is cut.
    """
    context = frozenset(text for text in strings_of(arguments) if text)
    folder = _folder(arguments)
    about = tuple(word for word in words_of(tool) if not is_verb(word)) or words_of(tool)
    leaves: list[Leaf] = []
    for value, place, words in islice(_values(result), _MAX_READ):
        if len(leaves) >= _MAX_LEAVES:
            break
        usable = usable_value(value)
        if usable is None or usable in context or (result.cut and str(usable) not in result.text):
            continue
        if place[:1] == "[" and place[1:2].isalpha() and isinstance(usable, str) and folder:
            usable = f"{folder}/{usable}"
        words = words or about
        leaves.append(Leaf(usable, f"{tool}: {place}", words, context))
    return tuple(dict.fromkeys(leaves))


def _folder(arguments: Mapping[str, object]) -> str:
    """The folder that an argument names; "" if none does. `[FILE] name` in the result is relative to it."""
    for name, value in arguments.items():
        if isinstance(value, str) and {"path", "directory", "folder", "dir"} & set(words_of(name)):
            return "" if value in (".", "/") else value.strip("/")
    return ""


def usable_value(value: object) -> Scalar | None:
    """The value if it can be an argument: short, printable and without the rollout's folder; else None."""
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, str):
        return None
    text = value.strip().removeprefix(f"{ROLLOUT_DIR}/")
    if not text or len(text) > LONGEST_VALUE or ROLLOUT_DIR in text:
        return None
    if text.endswith(":") or not any(char.isalnum() for char in text):
        return None
    plain = all(not unicodedata.category(char).startswith("C") for char in text)
    return text if plain and "\u2028" not in text and "\u2029" not in text else None


def strings_of(value: object) -> Iterator[str]:
    """All strings in a JSON value."""
    return (scalar for scalar in scalars_of(value) if isinstance(scalar, str))


def is_empty(result: ToolResult) -> bool:
    """Whether a result has no text, or its lists and strings are all empty."""
    return (
        not result.text.strip()
        if result.values is None
        else all(value in (None, "") for value in scalars_of(result.values))
    )


PlacedValue: TypeAlias = tuple[object, str, tuple[str, ...]]


def _values(result: ToolResult) -> Iterator[PlacedValue]:
    if result.values is not None:
        yield from _walk(result.values, "", (), 0)
    else:
        yield from _lines(result.text.rpartition("\n[cut here")[0].rpartition("\n")[0] if result.cut else result.text)


def _walk(value: object, path: str, words: tuple[str, ...], depth: int) -> Iterator[PlacedValue]:
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        named_values = cast(dict[str, object], value)
        if _is_index(named_values):
            yield from ((key, f"{path}{{}}", words) for key in named_values)
        for key, inner_value in named_values.items():
            inner = f"{path}.{key}".lstrip(".")
            named = words if key in _WRAPPERS and not path else (*words, *words_of(key))
            yield from _walk(inner_value, inner, named, depth + 1)
    elif isinstance(value, list):
        for item in cast(list[object], value):
            yield from _walk(item, f"{path}[]", words, depth + 1)
    elif isinstance(value, str) and "\n" in value:
        for line, place, line_words in _lines(value):
            yield line, f"{path} {place}".strip(), line_words or words
    else:
        yield value, path, words


def _is_index(value: dict[str, object]) -> bool:
    """Whether the keys of an object are values themselves, as in `{"p1": {...}, "p2": {...}}` and `{"bolt": 40, "nut": 7}`."""
    items = list(value.values())
    alike = [set(cast(dict[str, object], item)) for item in items if isinstance(item, dict)]
    if len(items) > 1 and len(alike) == len(items):
        return all(keys == alike[0] for keys in alike)
    return len(items) > 2 and all(isinstance(item, int | float) and not isinstance(item, bool) for item in items)


def _lines(text: str) -> Iterator[PlacedValue]:
    """The values of a plain text: `Key: value`, `[FILE] name`, list items and whole lines."""
    for line in text.split("\n"):
        stripped = _BULLET.sub("", line.strip(), count=1).strip()
        if not stripped:
            continue
        if match := _MARKED.fullmatch(stripped):
            yield match[2], f"[{match[1]}]", words_of(match[1])
        elif match := _LABELLED.fullmatch(stripped):
            for value in comma_list(match[2]) or [match[2]]:
                yield _unquoted(value), f"{match[1].strip()}:", words_of(match[1])
        elif values := comma_list(stripped):
            yield from ((_unquoted(value), "list", ()) for value in values)
        else:
            yield _unquoted(stripped), "lines", ()


def comma_list(line: str) -> list[str]:
    """The values of a line such as `bolt, nut and washer`; [] if it is a sentence."""
    first, *others = re.split(r"\s{0,9}[,;](?:\s+|(?=[^\d\s]))", line.strip().removesuffix("."))
    if not others:
        return []
    values = [first, *others[:-1], *re.split(r"(?:^|\s{1,9})(?:and|or)\s+", others[-1])]
    values = [value for value in values if value]
    short = all(len(value.split()) <= (3 if len(values) > 2 else 2) and usable_value(value) for value in values)
    return values if short else []


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"`" else text


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
        values = _short_values(text[begin : end.start() if end else len(text)])
        if len(values) > 1:
            yield ListedValues(words_of(start["label"] or ""), values)


def values_for(name: str, about: str, tool_description: str) -> list[str]:
    """The values that an argument's own description lists, and those that the tool's description lists under its name."""
    own = [about, *(line["about"] for line in _ARGUMENT.finditer(tool_description) if line["name"] == name)]
    last = words_of(name)[-1:]
    named = (listed for listed in lists_in(tool_description) if last and listed.label[-1:] == last)
    lists = [*(listed for text in own for listed in lists_in(text)), *named]
    return list(dict.fromkeys(value for listed in lists for value in listed.values))


def _short_values(text: str) -> tuple[str, ...]:
    """The values of a list; () if one of them is no short value, as in a sentence."""
    values: list[str] = []
    for piece in _BETWEEN.split(text.strip().rstrip(".;")):
        match = _QUOTED.fullmatch(piece) or _BARE.fullmatch(piece)
        if match is None or usable_value(match["text"]) != match["text"]:
            return ()
        values.append(match["text"])
    return tuple(dict.fromkeys(values))


_DAYS = 2
_DATE = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d(?!\d)")
_SPOKEN = re.compile(r"\b[A-Z][a-z]{2} \d{1,2} \d{4}\b")


def is_dated(text: str, now: datetime | None = None) -> bool:
    """Whether a text contains a date within two days of now, so that it will probably differ tomorrow."""
    today = (now or datetime.now(UTC)).date()
    near = [today + timedelta(days=days) for days in range(-_DAYS, _DAYS + 1)]
    dates = {f"{day:%Y-%m-%d}" for day in near} | {f"{day:%b %d %Y}" for day in near}
    dates |= {f"{day:%b} {day.day} {day.year}" for day in near}
    return any(match[0] in dates for pattern in (_DATE, _SPOKEN) for match in pattern.finditer(text))
