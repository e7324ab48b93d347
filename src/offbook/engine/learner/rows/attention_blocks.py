"""Which blocks of a tree's attention mask are full, partial or empty, computed from `subtree_end`. Pure numpy.

Query q sees an earlier key k iff q < subtree_end[k]. Take a block of queries q0..q1-1 and an earlier block of keys. The
block is full iff the smallest subtree_end of its keys is at least q1. It is not empty iff the largest is above q0. In a
layer with a sliding window q must also be less than `window` deeper in the tree than k. Bounds of the depths in both
blocks say so: a block that is empty because of the window may count as partial.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbook.engine.token_tree import Ints

BLOCK = 128
"""Tokens per block: FlexAttention's default, and a multiple of all tile sizes of its kernels."""
FEWEST = 2
"""Minimum number of blocks per mask: a dimension of size 1 triggers a separate compilation."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Nearness:
    """A sliding window: a token at depth d sees ancestors deeper than d - window. `depth`: int64 [T]."""

    depth: Ints
    window: int


@dataclass(frozen=True)
class Blocks:
    """A block-sparse mask of n x n blocks, query block by key block. A block that is neither partial nor full is
    empty."""

    size: int  # tokens per block
    subtree_end: Ints  # [n * size]; every padding token on the right is a tree of its own, so each query sees a key
    partial: Bools  # [n, n]
    full: Bools  # [n, n]

    @property
    def pairs(self) -> int:
        """Query-key products that a block-sparse kernel computes."""
        return int(self.partial.sum() + self.full.sum()) * self.size**2


def blocks(subtree_end: Ints, size: int = BLOCK, near: Nearness | None = None) -> Blocks:
    """The blocks of a forest's mask. `subtree_end`: int64 [T]; `size`: tokens per block, at least 2; `near`: the
    layer's sliding window."""
    tokens = len(subtree_end)
    count = max(FEWEST, -(-tokens // size))
    ends = np.concatenate([subtree_end, np.arange(tokens, count * size) + 1])
    by_block = ends.reshape(count, size)
    first = np.arange(count)[:, None] * size
    before = np.tri(count, k=-1, dtype=np.bool_)
    full = before & (by_block.min(1)[None] >= first + size)
    some = before & (by_block.max(1)[None] > first)
    if near is not None:
        depth = np.concatenate([near.depth, np.zeros(count * size - tokens, np.int64)]).reshape(count, size)
        low, high = depth.min(1), depth.max(1)
        full &= high[:, None] - low[None] < near.window
        some &= low[:, None] - high[None] < near.window
    return Blocks(size, ends, (some & ~full) | np.eye(count, dtype=np.bool_), full)
