"""The key-value cache of one batch: rows that calls enter and leave, written and read in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

_BLOCK = 64


@dataclass(frozen=True)
class CacheShape:
    """What a row holds per token: keys and values of `layers` x `heads` x `width`."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes per token and row."""
        return 2 * self.layers * self.heads * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Window:
    """Which part of the cache the next forward pass writes and reads: rows [first, first + n), columns [0, length).

    rows, columns, sources, places: int64, one entry per new token: it is written to (row, column) and taken from
    (source, place) of the forward's own keys; None: every token of every row, to `columns` [n]. `fresh`: the new
    tokens are all there is, so they are read as they are.
    """

    first: int
    count: int
    length: int
    columns: Tensor
    rows: Tensor | None = None
    sources: Tensor | None = None
    places: Tensor | None = None
    fresh: bool = False


class Slots(Cache):
    """kv [layers, 2, rows, heads, columns, width], grown by need. `window` must be set before a forward pass."""

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
        """Make room for `rows` rows of `columns` tokens; what is there stays."""
        have_rows, have_columns = self._kv.shape[2], self._kv.shape[4]
        if rows <= have_rows and columns <= have_columns:
            return
        more_columns = -(-max(columns, have_columns) // _BLOCK) * _BLOCK
        if have_columns and columns > have_columns:
            more_columns = max(more_columns, have_columns + have_columns // 2 // _BLOCK * _BLOCK)
        grown = self._allocated(max(rows, have_rows), more_columns)
        grown[:, :, :have_rows, :, :have_columns] = self._kv
        self._kv = grown

    def clear(self) -> None:
        """Give the memory back."""
        self._kv = self._allocated(0, 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """transformers' hook: store one layer's new keys and values [n, heads, q, width], give those to attend to."""
        window = self.window
        assert window is not None, "the window is set before each forward pass"
        layer = self._kv[layer_idx, :, window.first : window.first + window.count]
        if window.fresh:
            layer[0, :, :, : window.length] = key_states
            layer[1, :, :, : window.length] = value_states
            return key_states, value_states
        if window.rows is None:
            rows = torch.arange(window.count, device=layer.device)
            layer[0][rows, :, window.columns] = key_states[:, :, 0]
            layer[1][rows, :, window.columns] = value_states[:, :, 0]
        else:
            layer[0][window.rows, :, window.columns] = key_states[window.sources, :, window.places]
            layer[1][window.rows, :, window.columns] = value_states[window.sources, :, window.places]
        return layer[0, :, :, : window.length], layer[1, :, :, : window.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers' hook: tokens before this pass; positions are always given, so it only has to be a number."""
        return 0

    def read(self, row: int, length: int) -> Tensor:
        """A copy of one row's first tokens: [layers, 2, heads, length, width]."""
        return self._kv[:, :, row, :, :length].clone()

    def write(self, rows: Tensor, held: Tensor) -> None:
        """Put the same tokens at the start of several rows."""
        self._kv[:, :, rows, :, : held.shape[3]] = held[:, :, None]

    def copy(self, source: int, rows: Tensor, length: int) -> None:
        """Give `rows` the first tokens of row `source`."""
        self._kv[:, :, rows, :, :length] = self._kv[:, :, source : source + 1, :, :length]

    def move(self, sources: Tensor, rows: Tensor, length: int) -> None:
        """Copy whole rows, pairwise."""
        self._kv[:, :, rows, :, :length] = self._kv[:, :, sources, :, :length]
