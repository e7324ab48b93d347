"""Keys and values of prompts seen before, found again by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCK = 16
"""Prefixes are found at multiples of this many tokens, and then extended token by token."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """tokens, and their keys and values [layers, 2, heads, len(tokens), width]."""

    tokens: tuple[int, ...]
    held: Tensor


class PrefixStore:
    """The prefixes of one adapter's prompts, least recently used out first; at most `budget` tokens."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: OrderedDict[Prefix, None] = OrderedDict()
        self._index: dict[int, Prefix] = {}
        self._size = 0

    def find(self, tokens: Sequence[int]) -> tuple[Prefix, int] | None:
        """The stored prefix that shares the longest beginning with `tokens`, and that length."""
        best: Prefix | None = None
        for key in _chain(tokens):
            entry = self._index.get(key)
            if entry is None:
                break
            best = entry
        if best is None:
            return None
        self._entries.move_to_end(best)
        return best, common(best.tokens, tokens)

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether storing these tokens would add something."""
        if not BLOCK <= len(tokens) <= self._budget:
            return False
        found = self.find(tokens)
        return found is None or len(tokens) - found[1] >= BLOCK

    def put(self, prefix: Prefix) -> None:
        """Keep a prefix, in place of one that is its beginning."""
        found = self.find(prefix.tokens)
        if found and found[1] == len(found[0].tokens):
            self._drop(found[0])
        self._entries[prefix] = None
        self._size += len(prefix.tokens)
        for key in _chain(prefix.tokens):
            self._index[key] = prefix
        while self._size > self._budget:
            self._drop(next(iter(self._entries)))

    def _drop(self, prefix: Prefix) -> None:
        del self._entries[prefix]
        self._size -= len(prefix.tokens)
        for key in _chain(prefix.tokens):
            if self._index.get(key) is prefix:
                del self._index[key]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


def _chain(tokens: Sequence[int]) -> Iterator[int]:
    """A key per whole block, each over everything before it."""
    key = 0
    for at in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, *tokens[at - BLOCK : at]))
        yield key
