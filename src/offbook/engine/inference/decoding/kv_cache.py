"""The key-value cache of one batch, written and read in place by transformers' attention layers, and the store of those of
earlier prompts, looked up by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

_BLOCK = 64  # columns are allocated in multiples of this


@dataclass(frozen=True)
class CacheShape:
    """The shape of the keys and values of one token: `layers` x `heads` x `width` each, the largest of any layer."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Window:
    """The part of the cache that the next forward pass writes and reads: rows [first, first + count), columns [0, length).

    rows, columns, sources, places are int64 with one entry per new token: the keys at (source, place) of the forward pass
    are written to (row, column). Without `sources`, each row has one new token. `fresh`: the new tokens are the whole rows, so
    that the pass attends to its own keys.
    """

    first: int
    count: int
    length: int
    columns: Tensor
    rows: Tensor
    sources: Tensor | None = None
    places: Tensor | None = None
    fresh: bool = False


class KVCache(Cache):
    """Keys and values [layers, 2, rows, heads, columns, width], which grow on demand.

    `window` must be set before each forward pass.
    """

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.window: Window | None = None
        self._kv = self._allocated(0, 0)

    def _allocated(self, rows: int, columns: int) -> Tensor:
        shape = self.shape
        return torch.zeros(
            shape.layers, 2, rows, shape.heads, columns, shape.width, dtype=shape.dtype, device=shape.device
        )

    def reserve(self, rows: int, columns: int) -> None:
        """Grow to at least `rows` rows of `columns` tokens, and keep the contents."""
        have_rows, have_columns = self._kv.shape[2], self._kv.shape[4]
        if rows <= have_rows and columns <= have_columns:
            return
        more_columns = -(-max(columns, have_columns) // _BLOCK) * _BLOCK
        if have_columns and columns > have_columns:
            more_columns = max(more_columns, have_columns + have_columns // 2 // _BLOCK * _BLOCK)
        grown = self._allocated(max(rows, have_rows), more_columns)
        grown[:, :, :have_rows, :, :have_columns] = self._kv
        self._kv = grown

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [n, heads, q, width] of a layer, and return those to attend to.

        Called by transformers.
        """
        window = self.window
        assert window is not None, "the window is set before each forward pass"
        heads, width = key_states.shape[1], key_states.shape[3]
        layer = self._kv[layer_idx, :, window.first : window.first + window.count, :heads, :, :width]
        if window.fresh:
            layer[0, :, :, : window.length] = key_states
            layer[1, :, :, : window.length] = value_states
            return key_states, value_states
        if window.sources is None:
            layer[0][window.rows, :, window.columns] = key_states[:, :, 0]
            layer[1][window.rows, :, window.columns] = value_states[:, :, 0]
        else:
            layer[0][window.rows, :, window.columns] = key_states[window.sources, :, window.places]
            layer[1][window.rows, :, window.columns] = value_states[window.sources, :, window.places]
        return layer[0, :, :, : window.length], layer[1, :, :, : window.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0. Called by transformers to compute positions, which this engine always passes itself."""
        return 0

    def read(self, row: int, length: int) -> Tensor:
        """A copy of the first tokens of a row: [layers, 2, heads, length, width]."""
        return self._kv[:, :, row, :, :length].clone()

    def write(self, rows: Tensor, kv: Tensor) -> None:
        """Write kv [layers, 2, heads, length, width] to the beginning of several rows."""
        self._kv[:, :, rows, :, : kv.shape[3]] = kv[:, :, None]

    def copy(self, source: int, rows: Tensor, length: int) -> None:
        """Copy the first tokens of row `source` to other rows."""
        self._kv[:, :, rows, :, :length] = self._kv[:, :, source : source + 1, :, :length]

    def move(self, sources: Tensor, rows: Tensor, length: int) -> None:
        """Copy the first tokens of row sources[i] to row rows[i]."""
        self._kv[:, :, rows, :, :length] = self._kv[:, :, sources, :, :length]


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
