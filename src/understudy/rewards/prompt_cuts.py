"""Shortens a judge's prompt to its token budget: the least informative texts first, each in its middle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from understudy.errors import RolloutError

from .transcripts import TOOLS, Lines, json_line

BYTES_PER_TOKEN = 3
"""A conservative estimate: English has about 4, JSON and CJK about 3."""
FLOORS = (64, 300, 300, 1000)
"""Minimum characters that a text keeps, by tier. 0: images and files as data URLs. 1: results of tools. 2: the agent's
messages before its last one. 3: the task, user messages, tools, and the last message."""

Limits = tuple[int | None, ...]
"""Maximum characters of a text, by tier; None: no limit."""


def tokens_of(text: str) -> int:
    """The number of tokens of a text, estimated from its UTF-8 bytes."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def within(conversations: Sequence[Lines], tokens: int, mark: str) -> tuple[Lines, ...]:
    """Shorten conversations to at most `tokens` tokens. Raises RolloutError if they do not fit at the `FLOORS`.

    Tiers are shortened in order. The last one that is needed gets the largest limit that fits, so long texts lose most.
    `[{mark} cut N characters]` replaces the removed text."""
    budget = _Budget(conversations, tokens, mark)
    if budget.allows((None, None, None, None)):
        return budget.conversations((None, None, None, None))
    for tier in range(len(FLOORS)):
        below, above = FLOORS[:tier], (None,) * (len(FLOORS) - tier - 1)
        if budget.allows((*below, FLOORS[tier], *above)):
            low, high = FLOORS[tier], budget.longest
            while low < high:  # binary search for the largest limit that fits
                middle = (low + high + 1) // 2
                low, high = (middle, high) if budget.allows((*below, middle, *above)) else (low, middle - 1)
            return budget.conversations((*below, low, *above))
    raise RolloutError(
        f"the judge's prompt needs about {budget.tokens(FLOORS)} tokens with every long text cut, and max_prompt_tokens leaves "
        f"{tokens} for the trajectories: raise it, or judge fewer or shorter trajectories at once"
    )


class _Budget:
    def __init__(self, conversations: Sequence[Lines], tokens: int, mark: str) -> None:
        self._conversations = conversations
        self._tokens = tokens
        self._mark = mark
        self.longest = max((len(line) for lines in conversations for line in lines), default=0)

    def allows(self, limits: Limits) -> bool:
        """Whether the conversations fit in the budget with texts shortened to `limits`."""
        return self.tokens(limits) <= self._tokens

    def tokens(self, limits: Limits) -> int:
        return sum(tokens_of(line) + 1 for lines in self.conversations(limits) for line in lines)

    def conversations(self, limits: Limits) -> tuple[Lines, ...]:
        if limits == (None,) * len(limits):
            return tuple(self._conversations)
        return tuple(
            tuple(self._line(line, limits, last=i == len(lines) - 1) for i, line in enumerate(lines))
            for lines in self._conversations
        )

    def _line(self, line: str, limits: Limits, last: bool) -> str:
        if line.startswith(TOOLS):
            return TOOLS + json_line(self._cut(json.loads(line.removeprefix(TOOLS)), limits, 3))
        message: Any = json.loads(line)
        role = cast(dict[str, object], message).get("role") if isinstance(message, dict) else None
        tier = 1 if role in ("tool", "function") else 2 if role == "assistant" and not last else 3
        return json_line(self._cut(message, limits, tier))

    def _cut(self, value: Any, limits: Limits, tier: int) -> Any:
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return {name: self._cut(item, limits, tier) for name, item in items}
        if isinstance(value, list):
            return [self._cut(item, limits, tier) for item in cast(list[Any], value)]
        if not isinstance(value, str):
            return value
        limit = limits[0 if value.startswith("data:") and ";base64," in value[:200] else tier]
        return value if limit is None else self._shortened(value, limit)

    def _shortened(self, text: str, limit: int) -> str:
        removed = len(text) - limit
        note = f" [{self._mark} cut {removed} characters] "
        if removed <= len(note):
            return text
        head = limit * 3 // 5
        return text[:head] + note + text[len(text) - (limit - head) :]
