"""A judge's prompt within its budget: the least informative texts are cut first, in their middle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from understudy.errors import RolloutError

from .transcripts import TOOLS, Lines, json_line

BYTES_PER_TOKEN = 3
"""An estimate on the safe side: English has about 4, JSON and CJK about 3."""
FLOORS = (64, 300, 300, 1000)
"""Characters that a text keeps at least, by tier: 0 images and files as data URLs; 1 results of tools; 2 what the agent wrote
before its last message; 3 the task, its users, the tools, and the last message."""

Limits = tuple[int | None, ...]
"""Characters that a text of each tier keeps; None: all."""


def tokens_of(text: str) -> int:
    """Tokens of a text, estimated from its bytes."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def within(conversations: Sequence[Lines], tokens: int, mark: str) -> tuple[Lines, ...]:
    """The conversations, cut to at most that many tokens: tier by tier, each only as far as it must be, so that long texts
    lose most. `[{mark} cut N characters]` stands where something was left out. Raises RolloutError if nothing is enough."""
    fits = _Budget(conversations, tokens, mark)
    if fits.at((None, None, None, None)):
        return fits.conversations((None, None, None, None))
    for tier in range(len(FLOORS)):
        below, above = FLOORS[:tier], (None,) * (len(FLOORS) - tier - 1)
        if fits.at((*below, FLOORS[tier], *above)):
            low, high = FLOORS[tier], fits.longest
            while low < high:  # the largest limit that fits
                middle = (low + high + 1) // 2
                low, high = (middle, high) if fits.at((*below, middle, *above)) else (low, middle - 1)
            return fits.conversations((*below, low, *above))
    raise RolloutError(
        f"the judge's prompt needs about {fits.tokens(FLOORS)} tokens with every long text cut, and max_prompt_tokens leaves "
        f"{tokens} for the trajectories: raise it, or judge fewer or shorter trajectories at once"
    )


class _Budget:
    def __init__(self, conversations: Sequence[Lines], tokens: int, mark: str) -> None:
        self._conversations = conversations
        self._tokens = tokens
        self._mark = mark
        self.longest = max((len(line) for lines in conversations for line in lines), default=0)

    def at(self, limits: Limits) -> bool:
        """Whether the conversations fit with texts of these lengths."""
        return self.tokens(limits) <= self._tokens

    def tokens(self, limits: Limits) -> int:
        return sum(tokens_of(line) + 1 for lines in self.conversations(limits) for line in lines)

    def conversations(self, limits: Limits) -> tuple[Lines, ...]:
        if limits == (None,) * len(limits):
            return tuple(self._conversations)
        return tuple(
            tuple(self._line(line, limits, last=at == len(lines) - 1) for at, line in enumerate(lines))
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
            return {name: self._cut(each, limits, tier) for name, each in items}
        if isinstance(value, list):
            return [self._cut(each, limits, tier) for each in cast(list[Any], value)]
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
