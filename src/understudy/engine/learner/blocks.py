"""Which blocks of a tree's attention are full, partial or empty, from `subtree_end` alone. Pure numpy.

Of the keys k before a block of queries q0..q1-1, query q sees k iff q < subtree_end[k]. So a whole block of keys is seen
iff its smallest end is at least q1, and some of it iff its largest end is above q0: two numbers per block decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..token_tree import Ints

BLOCK = 128
"""Tokens per block: FlexAttention's default, and a multiple of every tile its kernels use."""
FEWEST = 2
"""Blocks of the smallest mask: a dimension of 1 would be compiled for by itself."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Blocks:
    """The mask of n blocks: `partial` and `full` are bool [n, n], query block by key block; what is neither is empty.

    `subtree_end` is [n * size]: each token of the padding on the right is a tree of its own, so that every query sees a key.
    """

    size: int
    subtree_end: Ints
    partial: Bools
    full: Bools

    @property
    def pairs(self) -> int:
        """Query-key products that a block-sparse kernel computes."""
        return int(self.partial.sum() + self.full.sum()) * self.size**2


def blocks(subtree_end: Ints, size: int = BLOCK) -> Blocks:
    """The blocks of a forest's mask, from its int64 [T]; `size` is at least 2."""
    tokens = len(subtree_end)
    count = max(FEWEST, -(-tokens // size))
    ends = np.concatenate([subtree_end, np.arange(tokens, count * size) + 1])
    by_block = ends.reshape(count, size)
    first = np.arange(count)[:, None] * size
    before = np.tri(count, k=-1, dtype=np.bool_)
    full = before & (by_block.min(1)[None] >= first + size)
    some = before & (by_block.max(1)[None] > first)
    return Blocks(size, ends, (some & ~full) | np.eye(count, dtype=np.bool_), full)
