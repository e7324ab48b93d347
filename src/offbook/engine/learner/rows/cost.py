"""How attention on a forest is cut into calls of a kernel, and the estimated cost of a layout in floating-point operations. No torch.

flash_pieces  A run of tokens attends to itself (causally) and to each of its ancestor runs (fully). In depth-first order a subtree
is a contiguous range, so one kernel call computes the attention of *all* descendants of a run to that run. Every piece is a pair of
slices and needs no gather. The parts of a query's softmax are merged by their log-sum-exp. A small subtree is cheaper as one block
with a dense mask.
flex          Blocks of the mask are full, partial or empty. Query q sees an earlier key k iff q < subtree_end[k]. Take a block of
queries q0..q1-1 and an earlier block of keys: it is full iff the smallest subtree_end of its keys is at least q1, and not empty iff
the largest is above q0.

What a kernel launch costs is assumed by device (`CALL_FLOPS`). The other constants are fixed. They were measured once,
except FLEX_SLOWDOWN (from FlexAttention's paper), FLEX_CALLS and RUN_CALLS (counted kernel launches)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from offbook.engine.token_tree import Ints, Segments

AttentionName = Literal["flash_pieces", "flex", "runs"]
"""How attention on a tree is computed; `attention.choose` decides."""

LINEAR_PASSES = 4  # operations per frozen weight and token: 2 forward, 2 backward (input gradient only)
LORA_PASSES = 6  # operations per trained weight and token: 2 forward, 4 backward
ATTENTION_PASSES = 12  # per pair, head and channel: QK and PV forward, their four products backward
ROW_CALLS = 90  # kernel launches per layer and batch of rows, forward and backward
PIECE_CALLS = 60  # cost of an attention piece per layer in launches, including the inefficiency of small kernels
RUN_CALLS = (
    25  # launches per layer of one run by SDPA: two concatenations, a mask, attention, and their backward passes
)
FLEX_CALLS = 15  # launches per layer that padding and cutting add to a row, forward and backward
FLEX_SLOWDOWN = (
    1.15  # time per product against the flash attention of plain rows (2412.05496: 0.9 forward, 0.85 backward)
)


@dataclass(frozen=True)
class ModelShape:
    """The properties of a model and its device that costs depend on.

    Parameter counts: `linear` in frozen layers, `lora` in the adapter, `head` in the output layer. `call_flops`:
    operations that the device does while one kernel launches. `attention`: the device's attention for trees.
    `longest_row`: most tokens of one tree row that the model's tables of positions allow; None: any number.
    """

    layers: int
    heads: int
    head_dim: int
    linear: int
    lora: int
    head: int
    call_flops: float = 2e5
    attention: AttentionName = "flash_pieces"
    longest_row: int | None = None

    @property
    def token_flops(self) -> float:
        """Operations per token, forward and backward, without attention and logits."""
        return LINEAR_PASSES * self.linear + LORA_PASSES * self.lora

    @property
    def pair_flops(self) -> float:
        """Operations per query-key product in all layers, forward and backward."""
        return ATTENTION_PASSES * self.layers * self.heads * self.head_dim

    @property
    def row_flops(self) -> float:
        """Fixed cost of a batch of rows, in operations."""
        return self.layers * ROW_CALLS * self.call_flops

    @property
    def piece_pairs(self) -> float:
        """Query-key products that take as long as launching one attention piece."""
        return self.launch_pairs(PIECE_CALLS)

    def launch_pairs(self, calls: float) -> float:
        """Query-key products that take as long as `calls` kernel launches per layer."""
        return self.layers * calls * self.call_flops / self.pair_flops


def tree_pairs(shape: ModelShape, runs: Segments, pieces: Sequence[Piece], subtree_end: Ints) -> float:
    """The cost of attention on a tree row, in query-key products. Includes kernel launches beyond those in
    `row_flops`."""
    if shape.attention == "flex":
        return FLEX_SLOWDOWN * blocks(subtree_end).pairs + shape.launch_pairs(FLEX_CALLS)
    if shape.attention == "runs":
        own = runs.end - runs.start
        return float((own * (runs.depth + own)).sum()) + len(runs) * shape.launch_pairs(RUN_CALLS)
    return sum(piece.pairs for piece in pieces) + (len(pieces) - 1) * shape.piece_pairs


@dataclass(frozen=True)
class Estimate:
    """The cost of a layout. `tokens` and `flops` exclude padding; `flops` includes attention and logits. The planner
    minimises `cost`, which is flops with padding and kernel launches."""

    tokens: int
    flops: float
    cost: float


BLOCK = 128
"""Tokens per block: FlexAttention's default, and a multiple of all tile sizes of its kernels."""
MIN_BLOCKS = 2
"""Minimum number of blocks per mask: a dimension of size 1 triggers a separate compilation."""

Bools = NDArray[np.bool_]


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


def blocks(subtree_end: Ints, size: int = BLOCK) -> Blocks:
    """The blocks of a forest's mask. `subtree_end`: int64 [T]; `size`: tokens per block, at least 2."""
    tokens = len(subtree_end)
    count = max(MIN_BLOCKS, -(-tokens // size))
    ends = np.concatenate([subtree_end, np.arange(tokens, count * size) + 1])
    by_block = ends.reshape(count, size)
    first = np.arange(count)[:, None] * size
    before = np.tri(count, k=-1, dtype=np.bool_)
    full = before & (by_block.min(1)[None] >= first + size)
    some = before & (by_block.max(1)[None] > first)
    return Blocks(size, ends, (some & ~full) | np.eye(count, dtype=np.bool_), full)


class Kind(Enum):
    """What a piece computes: the attention of which tokens to which."""

    CAUSAL = "causal"  # a run to itself, or a batch of `batch` adjacent runs of equal length
    BLOCK = "block"  # a few small adjacent subtrees to themselves, with a dense mask
    ABOVE = "above"  # all descendants of a run to that run, without a mask


@dataclass(frozen=True)
class Piece:
    """One kernel call: queries query[0]..query[1]-1 attend to keys key[0]..key[1]-1."""

    kind: Kind
    query: tuple[int, int]
    key: tuple[int, int]
    batch: int = 1

    @property
    def pairs(self) -> int:
        """Query-key products that the kernel computes; a dense block also computes masked ones."""
        queries = self.query[1] - self.query[0]
        if self.kind is Kind.CAUSAL:
            length = queries // self.batch
            return self.batch * length * (length + 1) // 2
        return queries * (self.key[1] - self.key[0])


@dataclass
class _Group:
    """Adjacent subtrees, the pieces that compute them, and their cost in query-key products."""

    start: int
    end: int
    pieces: list[Piece]
    cost: float
    run_length: int | None  # if the group is a batch of equally long leaf runs, else None


def cut(segments: Segments, call_pairs: float) -> tuple[Piece, ...]:
    """The pieces of a forest. CAUSAL and BLOCK pieces come first and contain every token exactly once as a query.

    `call_pairs`: the number of query-key products that take as long as launching one piece.
    """
    children: list[list[_Group]] = [[] for _ in range(len(segments))]
    roots: list[_Group] = []
    for s in reversed(range(len(segments))):
        below = _joined(children[s][::-1], call_pairs)
        group = _subtree(segments, s, below, call_pairs)
        parent = int(segments.parent[s])
        (children[parent] if parent >= 0 else roots).append(group)
        children[s] = []
    pieces = [piece for group in _joined(roots[::-1], call_pairs) for piece in group.pieces]
    return tuple(sorted(pieces, key=lambda piece: (piece.kind is Kind.ABOVE, piece.query)))


def _subtree(segments: Segments, s: int, below: list[_Group], call_pairs: float) -> _Group:
    start, end, last = int(segments.start[s]), int(segments.end[s]), int(segments.subtree_end[s])
    own = _causal(start, end)
    if last == end:
        return _Group(start, end, [own], call_pairs + own.pairs, end - start)
    above = Piece(Kind.ABOVE, (end, last), (start, end))
    cost = 2 * call_pairs + own.pairs + above.pairs + sum(group.cost for group in below)
    block = call_pairs + (last - start) ** 2
    if block < cost:
        return _Group(start, last, [_block(start, last)], block, None)
    return _Group(start, last, [own, above, *(piece for group in below for piece in group.pieces)], cost, None)


def _joined(groups: list[_Group], call_pairs: float) -> list[_Group]:
    """Merge adjacent groups if one call is cheaper: equally long leaf runs into a batch, small subtrees into a
    block."""
    joined: list[_Group] = []
    for group in groups:
        merged = _merge(joined[-1], group, call_pairs) if joined else None
        if merged is None:
            joined.append(group)
        else:
            joined[-1] = merged
    return joined


def _merge(a: _Group, b: _Group, call_pairs: float) -> _Group | None:
    best: _Group | None = None
    cost = a.cost + b.cost
    if a.run_length is not None and a.run_length == b.run_length:
        piece = Piece(Kind.CAUSAL, (a.start, b.end), (a.start, b.end), (b.end - a.start) // a.run_length)
        best = _Group(a.start, b.end, [piece], call_pairs + piece.pairs, a.run_length)
        cost = best.cost
    block = call_pairs + (b.end - a.start) ** 2
    if block < cost:
        best = _Group(a.start, b.end, [_block(a.start, b.end)], block, None)
    return best


def _causal(start: int, end: int) -> Piece:
    return Piece(Kind.CAUSAL, (start, end), (start, end))


def _block(start: int, end: int) -> Piece:
    return Piece(Kind.BLOCK, (start, end), (start, end))
