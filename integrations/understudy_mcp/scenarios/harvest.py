"""Extracts values from tool results, with their place in the result and words that describe them."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from ..connection.servers import ROLLOUT_DIR
from ..tools.results import ToolResult

Scalar: TypeAlias = str | int | float | bool

LONGEST_VALUE = 63
"""Arguments stay below 64 characters: a small policy copies them character by character."""
_MOST_LEAVES = 400
_DEEPEST = 8
SHORT = " (short)"
_HASH = re.compile(r"[0-9a-f]{32,64}")
_LABELLED = re.compile(r"([A-Za-z][\w /-]{0,30}): +(.+)")
_MARKED = re.compile(r"\[([A-Za-z]+)\] +(.+)")
_BULLET = re.compile(r"(?:[-*+•]|\d+[.)])\s+")
_WRAPPERS = {"result", "content", "text"}


@dataclass(frozen=True)
class Leaf:
    """One value of a tool result.

    `place` is the tool and the path, such as "read_graph: entities[].name"; `words` are the words of the path. Values with
    the same `record` come from one JSON object. `context` has the texts of the call's arguments.
    """

    value: Scalar
    place: str
    words: tuple[str, ...]
    record: str = ""
    context: frozenset[str] = frozenset()


def words_of(name: str) -> tuple[str, ...]:
    """Split a name into lower-case singular words: `entityNames` -> ("entity", "name")."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return tuple(singular(word.lower()) for word in re.findall(r"[A-Za-z]+|\d+", spaced))


def singular(word: str) -> str:
    """The singular of an English word, approximately: `entities` -> `entity`. Good enough to compare words."""
    if len(word) > 4 and word.endswith("ies"):
        return f"{word[:-3]}y"
    if len(word) > 4 and word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def leaves_of(tool: str, arguments: Mapping[str, object], result: ToolResult, neutral: str) -> tuple[Leaf, ...]:
    """The values of a result that could be arguments of other calls.

    `neutral` is the result's text with the rollout's folder as `{rollout_dir}`. Values that repeat an argument are left out.
    The first 8 digits of a long hash are an additional value.
    """
    context = frozenset(text for text in strings_of(arguments) if text)
    folder = _folder(arguments)
    leaves: list[Leaf] = []
    for value, place, words, record in _values(result, neutral):
        usable = usable_value(value)
        if usable is None or usable in context or len(leaves) >= _MOST_LEAVES:
            continue
        if place[:1] == "[" and place[1:2].isalpha() and isinstance(usable, str) and folder:
            usable = f"{folder}/{usable}"
        words = words or (singular(tool.lower()),)
        leaves.append(Leaf(usable, f"{tool}: {place}", words, record, context))
        if isinstance(usable, str) and _HASH.fullmatch(usable):
            leaves.append(Leaf(usable[:8], f"{tool}: {place}{SHORT}", words, record, context))
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
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast(Mapping[str, object], value).values():
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in cast(Sequence[object], value):
            yield from strings_of(item)


def json_of(result: ToolResult, neutral: str) -> object:
    """A result's JSON object or list; None if it is plain text or was cut."""
    try:
        value = cast(object, json.loads(neutral))
    except (ValueError, RecursionError):
        return None
    return None if result.cut or not isinstance(value, dict | list) else cast(dict[str, object] | list[object], value)


def is_empty(result: ToolResult, neutral: str) -> bool:
    """Whether a result has no text, or is JSON whose lists and strings are all empty."""
    value = json_of(result, neutral)
    return not neutral.strip() if value is None else _hollow(value)


def _hollow(value: object) -> bool:
    if isinstance(value, dict):
        return all(_hollow(item) for item in cast(dict[str, object], value).values())
    if isinstance(value, list):
        return all(_hollow(item) for item in cast(list[object], value))
    return value is None or value == ""


FoundValue: TypeAlias = tuple[object, str, tuple[str, ...], str]


def _values(result: ToolResult, neutral: str) -> Iterator[FoundValue]:
    value = json_of(result, neutral)
    yield from _lines(neutral) if value is None else _walk(value, "", (), "", 0)


def _walk(value: object, path: str, words: tuple[str, ...], record: str, depth: int) -> Iterator[FoundValue]:
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        for key, inner_value in cast(dict[str, object], value).items():
            inner = f"{path}.{key}".lstrip(".")
            named = words if key in _WRAPPERS and not path else (*words, *words_of(key))
            yield from _walk(inner_value, inner, named, record, depth + 1)
    elif isinstance(value, list):
        for number, inner_value in enumerate(cast(list[object], value)):
            item: object = inner_value
            inner = f"{record}/{path}{number}" if isinstance(item, dict) else record
            yield from _walk(inner_value, f"{path}[]", words, inner, depth + 1)
    elif isinstance(value, str) and "\n" in value:
        for line, place, line_words, _ in _lines(value):
            yield line, f"{path} {place}".strip(), line_words or words, record
    else:
        yield value, path, words, record


def _lines(text: str) -> Iterator[FoundValue]:
    """The values of a plain text: `Key: value`, `[FILE] name`, list items and whole lines."""
    for line in text.split("\n"):
        stripped = _BULLET.sub("", line.strip(), count=1).strip()
        if not stripped:
            continue
        if match := _MARKED.fullmatch(stripped):
            yield match[2], f"[{match[1]}]", words_of(match[1]), ""
        elif match := _LABELLED.fullmatch(stripped):
            yield _unquoted(match[2]), f"{match[1].strip()}:", words_of(match[1]), ""
        else:
            yield _unquoted(stripped), "lines", (), ""


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"`" else text
