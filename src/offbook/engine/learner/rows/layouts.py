"""The planner: lays the targets of a step out as rows, and chooses the cheapest of three layouts. Pure numpy.

call_rows  one causal row per call: the reference
leaf_rows  one causal row per leaf of the token tree. A conversation's turns share one row; a target in several rows is
           computed in the first. Where it is cheaper, they are packed into one row, as a forest without branches
tree       every token once, under the tree's attention mask. A tree above the token budget is split at branches, and
           the shared ancestors are computed again

The loss and its gradient are the same in all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from offbook.base.errors import ConfigError
from offbook.engine.token_tree import (
    Ints,
    Segments,
    TokenTree,
    build_tree,
    segments,
)

from .cost import Estimate, ModelShape, Piece, cut, tree_pairs

if TYPE_CHECKING:
    from offbook.base.config import LayoutName
    from offbook.engine.protocol import Sample

Chosen = Literal["tree", "leaf_rows", "call_rows"]
_PREFERRED: tuple[Chosen, ...] = ("tree", "leaf_rows", "call_rows")  # at equal cost


@dataclass(frozen=True)
class Forest:
    """The tree of a tree row of T tokens, as attention needs it."""

    segments: Segments
    pieces: tuple[Piece, ...]  # kernel calls of the flash_pieces attention; empty for others
    subtree_end: Ints  # [T]: token q sees token k iff k <= q < subtree_end[k]


@dataclass(frozen=True)
class ComputeRow:
    """The input of one forward and backward pass: B causal rows padded on the right to length L, or a forest, B = 1.

    Two calls with the prompt (1, 2) sampled (3, 4) and (5). As a tree, the prompt is computed once. Its last token,
    at index 1, predicts both 3 and 5:

    >>> from offbook.engine.protocol import Sample
    >>> from offbook.engine.token_tree import numbered
    >>> def sample(prompt, completion):
    ...     return Sample.bare(np.array(prompt, np.int32), np.array(completion, np.int32))
    >>> shape = ModelShape(layers=1, heads=1, head_dim=4, linear=64, lora=8, head=32)
    >>> samples = numbered([sample([1, 2], [3, 4]), sample([1, 2], [5])])
    >>> [row] = plan(samples, "tree", row_tokens=64, shape=shape).rows
    >>> row.token_ids.tolist(), row.positions.tolist()
    ([[1, 2, 3, 4, 5]], [[0, 1, 2, 3, 2]])
    >>> row.target_numbers.tolist(), row.target_predictors.tolist()
    ([0, 1, 2], [1, 2, 1])
    >>> [row] = plan(samples, "call_rows", row_tokens=64, shape=shape).rows  # both calls in one batch, padded with 0
    >>> row.token_ids.tolist(), row.target_predictors.tolist()
    ([[1, 2, 3, 4], [1, 2, 5, 0]], [1, 2, 5])
    """

    token_ids: Ints  # int64 [B, L]
    positions: Ints  # int64 [B, L], position embeddings' input: depth in the tree
    lengths: Ints  # int64 [B], without padding
    target_predictors: Ints  # int64 [R], flat index b * L + t of the token whose logits predict the target
    target_numbers: Ints  # int64 [R], the target's number in the step
    forest: Forest | None = None  # None: causal attention

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class LayoutPlan:
    """The chosen layout and its rows. `estimates`: all layouts considered; `refused`: why the tree was not, else
    None."""

    layout: Chosen
    rows: tuple[ComputeRow, ...]
    estimates: dict[Chosen, Estimate]
    refused: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens that one pass over the rows computes, without padding."""
        return self.estimates[self.layout].tokens

    @property
    def plain_tokens(self) -> int:
        """Tokens that one row per call would compute."""
        return self.estimates["call_rows"].tokens

    @property
    def flops(self) -> dict[Chosen, float]:
        """Operations of forward and backward pass per layout considered, including attention and logits."""
        return {layout: estimate.flops for layout, estimate in self.estimates.items()}


def plan(
    samples: Sequence[Sample],
    layout: LayoutName,
    row_tokens: int,
    shape: ModelShape,
    *,
    tree_refused: str | None = None,
) -> LayoutPlan:
    """Lay out the targets of `samples` in batches of at most `row_tokens` tokens. A longer row is a batch of its own.

    `tree_refused`: why this model cannot train on trees, or None; then `auto` and `tree` choose the cheaper plain
    layout. Samples without a completion are left out. Raises ConfigError for an empty prompt or repeated target
    numbers.
    """
    samples = [sample for sample in samples if len(sample.completion_ids)]
    tree = build_tree(samples)
    if len(np.unique(tree.target_number)) != len(tree.target_number):
        raise ConfigError("calls overlap in their target numbers: give each call an offset of its own")
    forest_tokens = min(row_tokens, shape.longest_row or row_tokens)
    makers: dict[Chosen, Callable[[], tuple[ComputeRow, ...]]] = {
        "call_rows": lambda: _batched(_call_paths(samples), row_tokens, shape),
        "leaf_rows": lambda: _leaf_rows(tree, row_tokens, forest_tokens if tree_refused is None else None, shape),
        "tree": lambda: tuple(_tree_rows(tree, forest_tokens, shape)),
    }
    if tree_refused is not None:
        del makers["tree"]
    rows: dict[Chosen, tuple[ComputeRow, ...]] = {}
    estimates: dict[Chosen, Estimate] = {}
    for name in _PREFERRED:
        if name in makers:
            rows[name] = makers[name]()
            estimates[name] = _estimate(rows[name], shape)
    cheapest = min(rows, key=lambda name: estimates[name].cost)
    chosen = cheapest if layout == "auto" or layout not in rows else layout
    return LayoutPlan(chosen, rows[chosen], estimates, tree_refused)


def _estimate(rows: Sequence[ComputeRow], shape: ModelShape) -> Estimate:
    tokens = sum(row.tokens for row in rows)
    logits = sum(len(row.target_numbers) for row in rows) * 4.0 * shape.head
    pairs = sum(_pairs(row) for row in rows)
    flops = tokens * shape.token_flops + pairs * shape.pair_flops + logits
    return Estimate(tokens, flops, sum(row_cost(row, shape) for row in rows))


def row_cost(row: ComputeRow, shape: ModelShape) -> float:
    """The row's part of `Estimate.cost`."""
    logits = len(row.target_numbers) * 4.0 * shape.head
    fixed = row.token_ids.size * shape.token_flops + shape.row_flops
    if row.forest is None:
        batch, length = row.token_ids.shape
        pairs = batch * length * (length + 1) / 2
    else:
        pairs = tree_pairs(shape, row.forest.segments, row.forest.pieces, row.forest.subtree_end)
    return logits + fixed + pairs * shape.pair_flops


def _pairs(row: ComputeRow) -> float:
    """Query-key products that the mask allows, without padding."""
    if row.forest is not None:
        return float((row.positions + 1).sum())
    return float((row.lengths * (row.lengths + 1) / 2).sum())


@dataclass(frozen=True)
class _Path:
    """A causal row before batching: its tokens, and the indexes of the tokens that predict its targets."""

    token_ids: Ints
    predictors: Ints
    target_numbers: Ints


def _call_paths(samples: Sequence[Sample]) -> list[_Path]:
    paths: list[_Path] = []
    for sample in samples:
        index = np.arange(len(sample.completion_ids))
        tokens = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64)
        paths.append(_Path(tokens, index + len(sample.prompt_ids) - 1, index + sample.offset))
    return paths


def _leaf_rows(
    tree: TokenTree, row_tokens: int, forest_tokens: int | None, shape: ModelShape
) -> tuple[ComputeRow, ...]:
    """Padded batches, or forests of at most `forest_tokens` tokens where these are cheaper (None: never)."""
    paths = _leaf_paths(tree)
    padded = _batched(paths, row_tokens, shape)
    if forest_tokens is None:
        return padded
    return min(padded, _packed(paths, forest_tokens, shape), key=lambda rows: _estimate(rows, shape).cost)


def _leaf_paths(tree: TokenTree) -> list[_Path]:
    leaves = tree.leaves
    owner = np.searchsorted(leaves, tree.target_node)
    by_owner = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[by_owner], np.arange(len(leaves) + 1))
    paths: list[_Path] = []
    for i, leaf in enumerate(leaves):
        targets = by_owner[bounds[i] : bounds[i + 1]]
        nodes = np.append(_ancestors(tree, int(leaf)), leaf)
        paths.append(
            _Path(tree.token_ids[nodes], tree.positions[tree.target_predictor[targets]], tree.target_number[targets])
        )
    return paths


def _ancestors(tree: TokenTree, node: int) -> Ints:
    above = tree.parents[node]
    chain = np.flatnonzero(tree.subtree_end[: above + 1] > node) if above >= 0 else np.zeros(0, np.int64)
    return chain.astype(np.int64)


def _batched(paths: Sequence[_Path], row_tokens: int, shape: ModelShape) -> tuple[ComputeRow, ...]:
    """Batch paths of similar length, padded on the right. A batch ends when its padding would cost more than a new
    batch."""
    order = sorted(range(len(paths)), key=lambda i: (-len(paths[i].token_ids), i))
    batches: list[list[_Path]] = []
    padding = 0
    for i in order:
        path = paths[i]
        if batches:
            longest = len(batches[-1][0].token_ids)
            extra = longest - len(path.token_ids)
            fits = (len(batches[-1]) + 1) * longest <= row_tokens
            if fits and (padding + extra) * shape.token_flops <= shape.row_flops:
                batches[-1].append(path)
                padding += extra
                continue
        batches.append([path])
        padding = 0
    return tuple(_padded(batch) for batch in batches)


def _padded(batch: Sequence[_Path]) -> ComputeRow:
    lengths = np.array([len(path.token_ids) for path in batch], np.int64)
    longest = int(lengths.max())
    token_ids = np.zeros((len(batch), longest), np.int64)
    for b, path in enumerate(batch):
        token_ids[b, : lengths[b]] = path.token_ids
    return ComputeRow(
        token_ids=token_ids,
        positions=np.tile(np.arange(longest), (len(batch), 1)),
        lengths=lengths,
        target_predictors=np.concatenate([b * longest + path.predictors for b, path in enumerate(batch)]),
        target_numbers=np.concatenate([path.target_numbers for path in batch]),
    )


def _packed(paths: Sequence[_Path], row_tokens: int, shape: ModelShape) -> tuple[ComputeRow, ...]:
    """Paths one after the other in rows of at most `row_tokens` tokens, each a tree of its own. No padding; paths of
    equal length are adjacent, so that one attention call computes them. A longer path is a row of its own."""
    packs: list[list[_Path]] = []
    room = 0
    for path in sorted(paths, key=lambda path: -len(path.token_ids)):
        if len(path.token_ids) > room or not packs:
            packs.append([])
            room = row_tokens
        packs[-1].append(path)
        room -= len(path.token_ids)
    return tuple(_chains(pack, shape) for pack in packs)


def _chains(paths: Sequence[_Path], shape: ModelShape) -> ComputeRow:
    lengths = np.array([len(path.token_ids) for path in paths], np.int64)
    ends = lengths.cumsum()
    starts = ends - lengths
    runs = Segments(starts, ends, ends, np.full(len(paths), -1), np.zeros(len(paths), np.int64))
    subtree_end = np.repeat(ends, lengths)
    pieces = cut(runs, shape.piece_pairs) if shape.attention == "flash_pieces" else ()
    return ComputeRow(
        token_ids=np.concatenate([path.token_ids for path in paths])[None],
        positions=runs.positions[None],
        lengths=np.array([ends[-1]], np.int64),
        target_predictors=np.concatenate([path.predictors + start for path, start in zip(paths, starts, strict=True)]),
        target_numbers=np.concatenate([path.target_numbers for path in paths]),
        forest=Forest(runs, pieces, subtree_end),
    )


def _tree_rows(tree: TokenTree, row_tokens: int, shape: ModelShape) -> Iterator[ComputeRow]:
    """One row per span of tokens: the span and its ancestors, renumbered, with the span's targets."""
    owner_order = np.argsort(tree.target_node, kind="stable")
    owners = tree.target_node[owner_order]
    for start, end in _spans(tree, row_tokens):
        keep = np.concatenate([_ancestors(tree, start), np.arange(start, end)])
        above = tree.parents[keep]
        parents = np.where(above >= 0, np.searchsorted(keep, above), -1)
        subtree_end = np.searchsorted(keep, tree.subtree_end[keep])
        positions = tree.positions[keep]
        runs = segments(parents, positions, subtree_end)
        targets = owner_order[slice(*np.searchsorted(owners, [start, end]))]
        pieces = cut(runs, shape.piece_pairs) if shape.attention == "flash_pieces" else ()
        yield ComputeRow(
            token_ids=tree.token_ids[keep][None],
            positions=positions[None],
            lengths=np.array([len(keep)], np.int64),
            target_predictors=np.searchsorted(keep, tree.target_predictor[targets]),
            target_numbers=tree.target_number[targets],
            forest=Forest(runs, pieces, subtree_end),
        )


def _spans(tree: TokenTree, row_tokens: int) -> Iterator[tuple[int, int]]:
    """Split the tree into contiguous token ranges that end at leaves. A range and the ancestors of its first token have
    at most `row_tokens` tokens, unless a single leaf needs more."""
    start = stop = 0
    for leaf in tree.leaves:
        end = int(leaf) + 1
        if stop > start and tree.positions[start] + end - start > row_tokens:
            yield start, stop
            start = stop
        stop = end
    if stop > start:
        yield start, stop
