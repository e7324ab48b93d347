"""The key-value cache of one batch, written and read in place by transformers' attention layers."""

from __future__ import annotations

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
    are written to (row, column). If `rows` is None, row i has one new token, written to `columns[i]`. `fresh`: the new
    tokens are the whole rows, so that the pass attends to its own keys.
    """

    first: int
    count: int
    length: int
    columns: Tensor
    rows: Tensor | None = None
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

    def clear(self) -> None:
        """Free the memory."""
        self._kv = self._allocated(0, 0)

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
        if window.rows is None:
            rows = torch.arange(window.count, device=layer.device)
            layer[0][rows, :, window.columns] = key_states[:, :, 0]
            layer[1][rows, :, window.columns] = value_states[:, :, 0]
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
