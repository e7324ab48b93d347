"""Chooses the values that a final answer must contain: values of tool results that are the same on a second run."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbook_mcp.tools.result_values import structure_of
from offbook_mcp.tools.results import ToolResult

from .dates import is_dated
from .harvest import SHORT, Leaf, comma_list, leaves_of, strings_of

_MOST_LISTED = 5
_LONGEST_LINE = 48
_NUMBER = re.compile(r"(?<![\w.,:/-])-?\d+(?:\.\d+)?(?![\w.]*\w|[,:/-]\w)")
"""A number that stands alone: no part of a date, a time, a version or an id."""


@dataclass(frozen=True)
class Answered:
    """A call with its result. `text` is the result with the rollout's folder replaced by its placeholder.

    `digest` is a hash of the whole result if the call has arguments in a language, such as SQL; else "".
    """

    tool: str
    arguments: Mapping[str, object]
    result: ToolResult
    text: str
    digest: str = ""


@dataclass(frozen=True)
class Expected:
    """Values that a final answer must contain. `ask` is the name by which the task asks for them; "" if it need not."""

    values: tuple[str, ...]
    ask: str = ""


def expected(first: Answered, second: Answered, rng: random.Random) -> Expected | None:
    """The values of a call's result that the final answer must contain, from two runs of the call.

    None if the result depends on the current time, or has no value that the task does not contain.
    """
    if is_dated(first.text) or is_dated(second.text):
        return None
    again = {(leaf.place, leaf.value) for leaf in _leaves(second)}
    leaves = [leaf for leaf in _leaves(first) if (leaf.place, leaf.value) in again and not isinstance(leaf.value, bool)]
    if first.text == second.text and "\n" not in first.text.strip() and (line := _line(first)) is not None:
        return line
    if named := _named(leaves, first):
        leaf = rng.choice(named)
        return Expected((_shown(leaf),), _spoken(leaf))
    listed = _listed(leaves)
    if first.text == second.text and listed:
        return Expected(tuple(_shown(leaf) for leaf in listed))
    return None


def _leaves(answered: Answered) -> tuple[Leaf, ...]:
    return leaves_of(answered.tool, answered.arguments, answered.result, answered.text)


def _named(leaves: Sequence[Leaf], answered: Answered) -> list[Leaf]:
    """Values whose name is unique in the result."""
    places = Counter(leaf.place for leaf in leaves)
    names = Counter(leaf.words for leaf in leaves)
    return [
        leaf
        for leaf in leaves
        if places[leaf.place] == names[leaf.words] == 1
        and not leaf.place.endswith(("lines", "list", SHORT, "]", "}"))
        and leaf.words[-1] not in answered.tool.split("_")
        and not leaf.words[-1].isdigit()
        and len(_shown(leaf)) > 1
    ]


def _spoken(leaf: Leaf) -> str:
    """The name of a value in its result, as written there: `address.postal_codes` is "address postal codes"."""
    path = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", leaf.place.partition(": ")[2]).lower()
    words = re.findall(r"[^\W\d_]+|\d+", path)[-len(leaf.words) :]
    return " ".join(dict.fromkeys(words if len(words) == len(leaf.words) else leaf.words))


def _listed(leaves: Sequence[Leaf]) -> list[Leaf]:
    """All values of a short list whose items have the same place."""
    leaves = [leaf for leaf in leaves if not leaf.place.endswith(SHORT)]
    values = {leaf.value for leaf in leaves}
    same = len({leaf.place.replace("[FILE]", "[DIR]") for leaf in leaves}) == 1
    return leaves if same and len(leaves) == len(values) <= _MOST_LISTED else []


def _line(answered: Answered) -> Expected | None:
    """Of a short sentence, the numbers that are not in the arguments; else the whole sentence."""
    text = answered.text.strip()
    if not text or text.endswith(":") or structure_of(text) is not None:
        return None
    known = {match for text_in_call in strings_of(answered.arguments) for match in _NUMBER.findall(text_in_call)}
    known |= {json.dumps(value) for value in answered.arguments.values() if isinstance(value, int | float)}
    numbers = [number for number in dict.fromkeys(_NUMBER.findall(text)) if number not in known]
    if 1 <= len(numbers) <= 2:
        return Expected(tuple(numbers))
    repeated = any(text in text_in_call for text_in_call in strings_of(answered.arguments))
    if len(comma_list(text)) > 1:
        return None
    return Expected((text,)) if len(text) <= _LONGEST_LINE and not repeated and "{" not in text else None


def _shown(leaf: Leaf) -> str:
    return leaf.value if isinstance(leaf.value, str) else json.dumps(leaf.value)
