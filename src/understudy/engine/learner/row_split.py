"""Rows in two, once, after the device ran out of memory: gradients do not depend on how targets are laid into rows."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..token_tree import Ints, segments
from .cost import ModelShape
from .layouts import ComputeRow, Forest
from .pieces import cut

log = logging.getLogger(__name__)


class RowSplit:
    """The rows of a step: whole until one of them runs out of memory, then those of more than half its size in two."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._largest: int | None = None
        self._row: ComputeRow | None = None

    def rows(self, rows: Sequence[ComputeRow]) -> Iterator[ComputeRow]:
        """The rows to compute. Each is remembered while it is computed."""
        if self._largest is not None:
            _give_back()
        for whole in rows:
            too_large = self._largest is not None and whole.token_ids.size > self._largest
            for part in (too_large and halves(whole, self._shape)) or (whole,):
                self._row = part
                yield part

    def after(self, error: torch.OutOfMemoryError) -> None:
        """Split from now on. Raises `error` when rows were split before, or the row cannot be split."""
        row = self._row
        if self._largest is not None or row is None or halves(row, self._shape) is None:
            raise error
        self._largest = row.token_ids.size // 2
        log.warning(
            "A row of %d tokens ran out of memory: rows of more than %d are computed in two. Lower row_tokens to do so at once",
            row.token_ids.size,
            self._largest,
        )


def halves(row: ComputeRow, shape: ModelShape) -> tuple[ComputeRow, ComputeRow] | None:
    """The row's targets on two smaller rows; None for a single chain of tokens, which has no branch to split at."""
    if row.forest is not None:
        return _tree_halves(row, row.forest, shape)
    if len(row.lengths) < 2:
        return None
    middle = len(row.lengths) // 2
    return _batch(row, 0, middle), _batch(row, middle, len(row.lengths))


def _batch(row: ComputeRow, start: int, end: int) -> ComputeRow:
    """Rows `start` to `end` of a padded batch, its padding cut to the longest."""
    width, longest = row.token_ids.shape[1], int(row.lengths[start:end].max())
    owner, place = np.divmod(row.target_predictors, width)
    mine = (owner >= start) & (owner < end)
    return ComputeRow(
        token_ids=row.token_ids[start:end, :longest],
        positions=row.positions[start:end, :longest],
        lengths=row.lengths[start:end],
        target_predictors=(owner[mine] - start) * longest + place[mine],
        target_ids=row.target_ids[mine],
    )


def _tree_halves(row: ComputeRow, forest: Forest, shape: ModelShape) -> tuple[ComputeRow, ComputeRow] | None:
    """Cut behind the leaf that leaves the larger part smallest; the second part computes its ancestors again."""
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
    """The tokens `keep` of a tree row, the first `repeated` of them only as context of the others."""
    positions = row.positions[0, keep]
    subtree_end = np.searchsorted(keep, forest.subtree_end[keep])
    runs = segments(_parents(positions), positions, subtree_end)
    own = (row.target_predictors >= keep[repeated]) & (row.target_predictors <= keep[-1])
    return ComputeRow(
        token_ids=row.token_ids[:, keep],
        positions=positions[None],
        lengths=np.array([len(keep)], np.int64),
        target_predictors=np.searchsorted(keep, row.target_predictors[own]),
        target_ids=row.target_ids[own],
        forest=Forest(runs, cut(runs, shape.piece_pairs) if forest.pieces else (), subtree_end),
    )


def _parents(positions: Ints) -> Ints:
    """Each token's parent in depth-first order: the last token before it that is one step nearer to the root; -1 for a root."""
    last = np.full(int(positions.max()) + 2, -1, np.int64)
    parents = np.empty(len(positions), np.int64)
    for i, depth in enumerate(positions):
        parents[i] = last[depth]
        last[depth + 1] = i
    return parents


def _give_back() -> None:
    """What the broken pass held, to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
