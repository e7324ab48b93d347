"""Splits attention on a forest into calls of an attention kernel. Pure numpy.

A run of tokens attends to itself (causally) and to each of its ancestor runs (fully). In depth-first order a subtree
is a contiguous range, so one kernel call computes the attention of *all* descendants of a run to that run. Every piece
is a pair of slices and needs no gather. The parts of a query's softmax are merged by their log-sum-exp. A small
subtree is cheaper as one block with a dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from offbook.engine.token_tree import Segments


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
