"""How far two answers to the same call agree. It says whether the small model does the same, not whether that is right."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import cast

from offbook.base.json_files import parse_json
from offbook.base.types import Json, Message

_WORD = re.compile(r"\w+")


def agreement(one: Message, other: Message) -> float:
    """F1 in [0, 1] of the tool calls, by name and arguments as JSON, if either answer has one; else of the words of the text.

    The F1 of words is that of SQuAD (Rajpurkar et al., arXiv 1606.05250, section 6.1).

    >>> agreement({"content": "It is on shelf 7."}, {"content": "on shelf 7"})
    0.75
    """
    tools = _tools(one), _tools(other)
    return _f1(*tools) if any(tools) else _f1(_words(one), _words(other))


def _f1(one: Counter[str], other: Counter[str]) -> float:
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 1.0


def _words(message: Message) -> Counter[str]:
    content: Json = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(str(part.get("text") or "") for part in cast(Iterable[dict[str, Json]], content))
    return Counter(_WORD.findall(content.lower()))


def _tools(message: Message) -> Counter[str]:
    called = cast(Iterable[dict[str, Json]], message.get("tool_calls") or ())
    return Counter(f"{call['function']['name']} {_canonical(call['function']['arguments'])}" for call in called)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(parse_json(arguments), sort_keys=True)
    except ValueError:
        return arguments
