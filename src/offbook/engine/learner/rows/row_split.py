"""What follows when the device runs out of memory in a row: it is computed again with activation recomputation if it
was computed without, and then in two. The gradient depends on neither."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from offbook.engine.token_tree import Ints, segments

from .cost import ModelShape, cut
from .layouts import ComputeRow, Forest

logger = logging.getLogger(__name__)


class RecomputingPolicy(Protocol):
    """The part of `Policy` that `RowSplit` uses."""

    shape: ModelShape
    unrecomputed_tokens: int


class RowSplit:
    """The rows of a step. After an out-of-memory error, rows of more than half the failed row's size recompute their
    activations; if the failed row did so already, every such row is split in two. There is no second split."""

    def __init__(self, policy: RecomputingPolicy) -> None:
        self._policy = policy
        self._shape = policy.shape
        self._failed = False
        self._largest: int | None = None
        self._row: ComputeRow | None = None

    def rows(self, rows: Sequence[ComputeRow]) -> Iterator[ComputeRow]:
        """Yield the rows to compute, split if needed, and remember the current one for `after`."""
        if self._failed:
            _release_memory()
        for whole in rows:
            too_large = self._largest is not None and whole.token_ids.size > self._largest
            for part in (too_large and halves(whole, self._shape)) or (whole,):
                self._row = part
                yield part

    def after(self, error: torch.OutOfMemoryError) -> None:
        """Recompute, or split rows, from now on. Raises `error` if rows were split before, or the failed row cannot
        be split."""
        row = self._row
        self._failed = True
        if row is not None and row.token_ids.size <= self._policy.unrecomputed_tokens:
            self._policy.unrecomputed_tokens = row.token_ids.size // 2
            logger.warning(
                "A row of %d tokens ran out of memory without activation recomputation: rows of more than %d recompute now",
                row.token_ids.size,
                self._policy.unrecomputed_tokens,
            )
            return
        if self._largest is not None or row is None or halves(row, self._shape) is None:
            raise error
        self._largest = row.token_ids.size // 2
        logger.warning(
            "A row of %d tokens ran out of memory: rows of more than %d are computed in two. Lower row_tokens to do so at once",
            row.token_ids.size,
            self._largest,
        )


def halves(row: ComputeRow, shape: ModelShape) -> tuple[ComputeRow, ComputeRow] | None:
    """Two smaller rows that hold the row's targets. None: a single sequence of tokens has no branch to split at."""
    if row.forest is not None:
        return _tree_halves(row, row.forest, shape)
    if len(row.lengths) < 2:
        return None
    middle = len(row.lengths) // 2
    return _batch(row, 0, middle), _batch(row, middle, len(row.lengths))


def _batch(row: ComputeRow, start: int, end: int) -> ComputeRow:
    """Rows start..end-1 of a padded batch, with the padding reduced to their longest row."""
    width, longest = row.token_ids.shape[1], int(row.lengths[start:end].max())
    owner, place = np.divmod(row.target_predictors, width)
    inside = (owner >= start) & (owner < end)
    return ComputeRow(
        token_ids=row.token_ids[start:end, :longest],
        positions=row.positions[start:end, :longest],
        lengths=row.lengths[start:end],
        target_predictors=(owner[inside] - start) * longest + place[inside],
        target_numbers=row.target_numbers[inside],
    )


def _tree_halves(row: ComputeRow, forest: Forest, shape: ModelShape) -> tuple[ComputeRow, ComputeRow] | None:
    """Split after the leaf that minimises the larger part. The second part computes its ancestors again."""
    count = row.token_ids.size
    ends = np.flatnonzero(forest.subtree_end == np.arange(1, count + 1))[:-1] + 1
    if not len(ends):
        return None
    sizes = np.maximum(ends, row.positions[0, ends] + count - ends)
    if int(sizes.min()) >= count:
        return None
    end = int(ends[np.argmin(sizes)])
    above = np.flatnonzero(forest.subtree_end[:end] > end)
    first, second = np.arange(end), np.concatenate([above, np.arange(end, count)])
    return _part(row, forest, first, 0, shape), _part(row, forest, second, len(above), shape)


def _part(row: ComputeRow, forest: Forest, keep: Ints, repeated: int, shape: ModelShape) -> ComputeRow:
    """The tokens `keep` of a tree row. The first `repeated` of them are only context: their targets are in the other
    part."""
    positions = row.positions[0, keep]
    subtree_end = np.searchsorted(keep, forest.subtree_end[keep])
    runs = segments(_parents(positions), positions, subtree_end)
    own = (row.target_predictors >= keep[repeated]) & (row.target_predictors <= keep[-1])
    return ComputeRow(
        token_ids=row.token_ids[:, keep],
        positions=positions[None],
        lengths=np.array([len(keep)], np.int64),
        target_predictors=np.searchsorted(keep, row.target_predictors[own]),
        target_numbers=row.target_numbers[own],
        forest=Forest(runs, cut(runs, shape.piece_pairs) if forest.pieces else (), subtree_end),
    )


def _parents(positions: Ints) -> Ints:
    """Every token's parent, -1 at a root: in depth-first order, the last earlier token of a depth less by one."""
    last = np.full(int(positions.max()) + 2, -1, np.int64)
    parents = np.empty(len(positions), np.int64)
    for i, depth in enumerate(positions):
        parents[i] = last[depth]
        last[depth + 1] = i
    return parents


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
