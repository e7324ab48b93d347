"""A cache of keys and values of earlier prompts, looked up by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

BLOCK = 16
"""Prefixes are looked up in blocks of this many tokens; the match is then extended token by token."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Tokens with their keys and values `kv` [layers, 2, heads, len(tokens), width]."""

    tokens: tuple[int, ...]
    kv: Tensor


class PrefixStore:
    """The prefixes of one adapter, at most `budget` tokens. Evicts the least recently used first."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: OrderedDict[Prefix, None] = OrderedDict()
        self._index: dict[int, Prefix] = {}
        self._size = 0

    def find(self, tokens: Sequence[int]) -> tuple[Prefix, int] | None:
        """The prefix that has the most first blocks in common with `tokens`, and the number of common first tokens."""
        best: Prefix | None = None
        for key in _block_keys(tokens):
            entry = self._index.get(key)
            if entry is None:
                break
            best = entry
        if best is None:
            return None
        self._entries.move_to_end(best)
        return best, common(best.tokens, tokens)

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether storing these tokens adds at least one block, and they fit the budget."""
        if not BLOCK <= len(tokens) <= self._budget:
            return False
        match = self.find(tokens)
        return match is None or len(tokens) - match[1] >= BLOCK

    def put(self, prefix: Prefix) -> None:
        """Store a prefix. It replaces one that is its beginning."""
        match = self.find(prefix.tokens)
        if match and match[1] == len(match[0].tokens):
            self._drop(match[0])
        self._entries[prefix] = None
        self._size += len(prefix.tokens)
        for key in _block_keys(prefix.tokens):
            self._index[key] = prefix
        while self._size > self._budget:
            self._drop(next(iter(self._entries)))

    def _drop(self, prefix: Prefix) -> None:
        del self._entries[prefix]
        self._size -= len(prefix.tokens)
        for key in _block_keys(prefix.tokens):
            if self._index.get(key) is prefix:
                del self._index[key]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of first tokens that two sequences have in common.

    >>> common([1, 2, 3], [1, 2, 4, 5])
    2
    """
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


def _block_keys(tokens: Sequence[int]) -> Iterator[int]:
    """A key per complete block, each computed from all tokens up to the block's end."""
    key = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = hash((key, *tokens[end - BLOCK : end]))
        yield key
