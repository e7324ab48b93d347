"""The planner: how the targets of a step are laid out as rows, and which layout is cheapest. Pure numpy.

call_rows  one row per call: the reference
leaf_rows  one causal row per leaf of the token tree: turns merged, each target computed in the first leaf that holds it
tree       every token once; split at branches beyond the token budget, the ancestors computed again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...errors import ConfigError
from ..token_tree import Ints, Segments, TokenTree, build_tree, segments
from .cost import Estimate, ModelShape, tree_pairs
from .pieces import Piece, cut

if TYPE_CHECKING:
    from ...config import LayoutName
    from ..protocol import Sample

Chosen = Literal["tree", "leaf_rows", "call_rows"]
_PREFERRED: tuple[Chosen, ...] = ("tree", "leaf_rows", "call_rows")  # at equal cost


@dataclass(frozen=True)
class Forest:
    """What attention needs of a tree row: its runs, its kernel calls, and where each token's subtree ends, [T]."""

    segments: Segments
    pieces: tuple[Piece, ...]
    subtree_end: Ints


@dataclass(frozen=True)
class ComputeRow:
    """One forward and backward: token_ids, positions int64 [B, L], rows padded on the right to L (lengths [B]).

    Plain rows are causal; with `forest` B is 1 and the tree is the mask. Target i of n: `target_predictors` is the flat
    index b * L + t of the token that predicts it, `target_ids` its number in the step.
    """

    token_ids: Ints
    positions: Ints
    lengths: Ints
    target_predictors: Ints
    target_ids: Ints
    forest: Forest | None = None

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class LayoutPlan:
    """The chosen layout and its rows. `estimates` holds every layout considered; `refused` why the tree was not."""

    layout: Chosen
    rows: tuple[ComputeRow, ...]
    estimates: dict[Chosen, Estimate]
    refused: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the plan computes."""
        return self.estimates[self.layout].tokens

    @property
    def plain_tokens(self) -> int:
        """Tokens that one row per call would compute."""
        return self.estimates["call_rows"].tokens

    @property
    def flops(self) -> dict[Chosen, float]:
        """Forward and backward of each layout considered, attention and logits included."""
        return {layout: estimate.flops for layout, estimate in self.estimates.items()}


def plan(
    samples: Sequence[Sample],
    layout: LayoutName,
    row_tokens: int,
    shape: ModelShape,
    *,
    tree_refused: str | None = None,
) -> LayoutPlan:
    """Lay out the targets of `samples` in batches of at most `row_tokens` tokens; a longer single row goes alone.

    `tree_refused`: why this model must not be trained on trees; then `auto` and `tree` take the best plain rows.
    Samples without a completion are left out. Raises ConfigError for an empty prompt or repeated target numbers.
    """
    samples = [sample for sample in samples if len(sample.completion_ids)]
    tree = build_tree(samples)
    if len(np.unique(tree.target_id)) != len(tree.target_id):
        raise ConfigError("calls overlap in their target numbers: give each call an offset of its own")
    makers: dict[Chosen, Callable[[], tuple[ComputeRow, ...]]] = {
        "call_rows": lambda: _batched(_call_paths(samples), row_tokens, shape),
        "leaf_rows": lambda: _batched(_leaf_paths(tree), row_tokens, shape),
        "tree": lambda: tuple(_tree_rows(tree, row_tokens, shape)),
    }
    if tree_refused is not None:
        del makers["tree"]
    made: dict[Chosen, tuple[ComputeRow, ...]] = {}
    estimates: dict[Chosen, Estimate] = {}
    for name in _PREFERRED:
        if name in makers:
            made[name] = makers[name]()
            estimates[name] = _estimate(made[name], shape)
    cheapest = min(made, key=lambda name: estimates[name].cost)
    chosen = cheapest if layout == "auto" or layout not in made else layout
    return LayoutPlan(chosen, made[chosen], estimates, tree_refused)


def _estimate(rows: Sequence[ComputeRow], shape: ModelShape) -> Estimate:
    tokens = sum(row.tokens for row in rows)
    targets = sum(len(row.target_ids) for row in rows) * 4.0 * shape.head
    seen = sum(_pairs(row) for row in rows)
    cost = targets
    for row in rows:
        cost += row.token_ids.size * shape.token_flops + shape.row_flops
        if row.forest is None:
            batch, length = row.token_ids.shape
            cost += batch * length * (length + 1) / 2 * shape.pair_flops
        else:
            tree = row.forest
            cost += tree_pairs(shape, tree.segments, tree.pieces, tree.subtree_end) * shape.pair_flops
    return Estimate(tokens, tokens * shape.token_flops + seen * shape.pair_flops + targets, cost)


def _pairs(row: ComputeRow) -> float:
    """Query-key products that the mask lets through, padding left out."""
    if row.forest is not None:
        return float((row.positions + 1).sum())
    return float((row.lengths * (row.lengths + 1) / 2).sum())


# ---- plain rows


@dataclass(frozen=True)
class _Path:
    """A causal row before batching: its tokens, and the positions that predict its targets."""

    token_ids: Ints
    predictors: Ints
    target_ids: Ints


def _call_paths(samples: Sequence[Sample]) -> list[_Path]:
    paths: list[_Path] = []
    for sample in samples:
        count = len(sample.completion_ids)
        at = np.arange(count)
        tokens = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64)
        paths.append(_Path(tokens, at + len(sample.prompt_ids) - 1, at + sample.offset))
    return paths


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
            _Path(tree.token_ids[nodes], tree.positions[tree.target_predictor[targets]], tree.target_id[targets])
        )
    return paths


def _ancestors(tree: TokenTree, node: int) -> Ints:
    """The tokens above `node`, from the root down."""
    above = tree.parents[node]
    chain = np.flatnonzero(tree.subtree_end[: above + 1] > node) if above >= 0 else np.zeros(0, np.int64)
    return chain.astype(np.int64)


def _batched(paths: Sequence[_Path], row_tokens: int, shape: ModelShape) -> tuple[ComputeRow, ...]:
    """Paths of similar length together, padded on the right; a batch ends where padding costs more than a new one."""
    order = sorted(range(len(paths)), key=lambda i: (-len(paths[i].token_ids), i))
    batches: list[list[_Path]] = []
    padding = 0
    for i in order:
        path = paths[i]
        if batches:
            longest = len(batches[-1][0].token_ids)
            more = longest - len(path.token_ids)
            fits = (len(batches[-1]) + 1) * longest <= row_tokens
            if fits and (padding + more) * shape.token_flops <= shape.row_flops:
                batches[-1].append(path)
                padding += more
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
        target_ids=np.concatenate([path.target_ids for path in batch]),
    )


# ---- the tree


def _tree_rows(tree: TokenTree, row_tokens: int, shape: ModelShape) -> Iterator[ComputeRow]:
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
            target_ids=tree.target_id[targets],
            forest=Forest(runs, pieces, subtree_end),
        )


def _spans(tree: TokenTree, row_tokens: int) -> Iterator[tuple[int, int]]:
    """Contiguous token ranges, each a row together with the ancestors of its first token. They end at leaves."""
    start = done = 0
    for leaf in tree.leaves:
        end = int(leaf) + 1
        if done > start and tree.positions[start] + end - start > row_tokens:
            yield start, done
            start = done
        done = end
    if done > start:
        yield start, done
