"""Values in what tools answered: where each was, and words for it."""

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
"""Arguments stay shorter than 64 characters: a small policy copies them one character after the other."""
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
    """One value of an answer. `place` names where it was ("read_graph: entities[].name"), `words` are those of the place,
    `record` tells values of one JSON object from those of others, `context` are the texts of the call's arguments."""

    value: Scalar
    place: str
    words: tuple[str, ...]
    record: str = ""
    context: frozenset[str] = frozenset()


def words_of(name: str) -> tuple[str, ...]:
    """`entityNames` -> ("entity", "name"): lower case, singular."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return tuple(singular(word.lower()) for word in re.findall(r"[A-Za-z]+|\d+", spaced))


def singular(word: str) -> str:
    """`entities` -> `entity`. Only as good as comparing needs."""
    if len(word) > 4 and word.endswith("ies"):
        return f"{word[:-3]}y"
    if len(word) > 4 and word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word


def leaves_of(tool: str, arguments: Mapping[str, object], result: ToolResult, neutral: str) -> tuple[Leaf, ...]:
    """The values of an answer that could be arguments of other calls. `neutral` is its text with the rollout's folder as
    `{rollout_dir}`. What only repeats an argument is left out; of a long hash its first 8 digits are a value too."""
    context = frozenset(text for text in strings_of(arguments) if text)
    folder = _folder(arguments)
    found: list[Leaf] = []
    for value, place, words, record in _values(result, neutral):
        usable = usable_value(value)
        if usable is None or usable in context or len(found) >= _MOST_LEAVES:
            continue
        if place[:1] == "[" and place[1:2].isalpha() and isinstance(usable, str) and folder:
            usable = f"{folder}/{usable}"
        words = words or (singular(tool.lower()),)
        found.append(Leaf(usable, f"{tool}: {place}", words, record, context))
        if isinstance(usable, str) and _HASH.fullmatch(usable):
            found.append(Leaf(usable[:8], f"{tool}: {place}{SHORT}", words, record, context))
    return tuple(dict.fromkeys(found))


def _folder(arguments: Mapping[str, object]) -> str:
    """The folder that was listed, where an argument names one: `[FILE] name` in the answer is below it."""
    for name, value in arguments.items():
        if isinstance(value, str) and {"path", "directory", "folder", "dir"} & set(words_of(name)):
            return "" if value in (".", "/") else value.strip("/")
    return ""


def usable_value(value: object) -> Scalar | None:
    """The value as an argument: short, printable, and not tied to one rollout's folder; else None."""
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
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in cast(Mapping[str, object], value).values():
            yield from strings_of(each)
    elif isinstance(value, list | tuple):
        for each in cast(Sequence[object], value):
            yield from strings_of(each)


def json_of(result: ToolResult, neutral: str) -> object:
    """An answer's JSON object or list; None where it is a text."""
    try:
        value = cast(object, json.loads(neutral))
    except (ValueError, RecursionError):
        return None
    return None if result.cut or not isinstance(value, dict | list) else cast(dict[str, object] | list[object], value)


def is_empty(result: ToolResult, neutral: str) -> bool:
    """Whether an answer holds nothing: no text, or JSON whose lists and texts are all empty."""
    value = json_of(result, neutral)
    return not neutral.strip() if value is None else _hollow(value)


def _hollow(value: object) -> bool:
    if isinstance(value, dict):
        return all(_hollow(each) for each in cast(dict[str, object], value).values())
    if isinstance(value, list):
        return all(_hollow(each) for each in cast(list[object], value))
    return value is None or value == ""


Found: TypeAlias = tuple[object, str, tuple[str, ...], str]


def _values(result: ToolResult, neutral: str) -> Iterator[Found]:
    value = json_of(result, neutral)
    yield from _lines(neutral) if value is None else _walk(value, "", (), "", 0)


def _walk(value: object, path: str, words: tuple[str, ...], record: str, depth: int) -> Iterator[Found]:
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        for key, each in cast(dict[str, object], value).items():
            inner = f"{path}.{key}".lstrip(".")
            named = words if key in _WRAPPERS and not path else (*words, *words_of(key))
            yield from _walk(each, inner, named, record, depth + 1)
    elif isinstance(value, list):
        for number, each in enumerate(cast(list[object], value)):
            item: object = each
            inner = f"{record}/{path}{number}" if isinstance(item, dict) else record
            yield from _walk(each, f"{path}[]", words, inner, depth + 1)
    elif isinstance(value, str) and "\n" in value:
        for line, place, line_words, _ in _lines(value):
            yield line, f"{path} {place}".strip(), line_words or words, record
    else:
        yield value, path, words, record


def _lines(text: str) -> Iterator[Found]:
    """`Key: value`, `[FILE] name`, list items and whole lines."""
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
