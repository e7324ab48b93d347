"""The token tree: all calls of a step as one prefix forest in depth-first order. Pure numpy.

Token q sees token k iff k <= q < subtree_end[k]. Every sampled token is one *target* per call that sampled it, however
many calls share its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

if TYPE_CHECKING:
    from .protocol import Sample

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """Maximal unbranched runs of a forest of T tokens, in depth-first order; all arrays int64 [S].

    Run s holds tokens start[s]..end[s]-1, its subtree ends at subtree_end[s], `parent` is the run before it (-1: a root),
    `depth` the position of its first token.
    """

    start: Ints
    end: Ints
    subtree_end: Ints
    parent: Ints
    depth: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class TokenTree:
    """A prefix forest in depth-first order.

    token_ids, positions (depth), parents (-1: a root), subtree_end: int64 [T]. Target i of N: target_node holds its
    token, target_predictor the token whose logits predict it, target_id its number in the step; sorted by target_id.
    """

    token_ids: Ints
    positions: Ints
    parents: Ints
    subtree_end: Ints
    target_node: Ints
    target_predictor: Ints
    target_id: Ints

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def leaves(self) -> Ints:
        """Tokens without a child, ascending."""
        return np.flatnonzero(self.subtree_end == np.arange(len(self)) + 1)

    def segments(self) -> Segments:
        """The tree's maximal unbranched runs."""
        return segments(self.parents, self.positions, self.subtree_end)


def numbered(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples with their offsets: targets are numbered 0..N-1 in the order of the samples."""
    lengths = np.array([len(sample.completion_ids) for sample in samples], np.int64)
    starts = (np.cumsum(lengths) - lengths).tolist()
    return tuple(replace(sample, offset=start) for sample, start in zip(samples, starts, strict=True))


def build_tree(samples: Sequence[Sample]) -> TokenTree:
    """The forest of all samples; the same for every order of them. Raises ConfigError for an empty prompt."""
    order = sorted(range(len(samples)), key=lambda i: _sort_key(samples[i]))
    tokens, parents, positions = _Growing(), _Growing(), _Growing()
    size = max((sample.length for sample in samples), default=0)
    total = sum(sample.length for sample in samples)
    path = np.zeros(size, np.int64)  # node of the current sample at each depth
    subtree_end = np.zeros(total, np.int64)
    before = np.zeros(0, np.int64)
    nodes, predictors, ids = _Growing(), _Growing(), _Growing()
    count = 0
    for i in order:
        sample = samples[i]
        sequence = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64)
        prompt = len(sample.prompt_ids)
        if prompt == 0 and len(sample.completion_ids):
            raise ConfigError(f"call {i}: the prompt is empty, so nothing predicts its first sampled token")
        shared = common_prefix(before, sequence)
        subtree_end[path[shared : len(before)]] = count
        fresh = len(sequence) - shared
        path[shared : len(sequence)] = np.arange(count, count + fresh)
        tokens.add(sequence[shared:])
        positions.add(np.arange(shared, len(sequence)))
        if fresh:
            parents.add(np.concatenate([[path[shared - 1] if shared else -1], path[shared : len(sequence) - 1]]))
        count += fresh
        nodes.add(path[prompt : len(sequence)].copy())
        predictors.add(path[prompt - 1 : len(sequence) - 1].copy() if len(sample.completion_ids) else path[:0])
        ids.add(np.arange(sample.offset, sample.offset + len(sample.completion_ids)))
        before = sequence
    subtree_end[path[: len(before)]] = count
    target_id = ids.joined()
    by_id = np.argsort(target_id, kind="stable")
    return TokenTree(
        token_ids=tokens.joined(),
        positions=positions.joined(),
        parents=parents.joined(),
        subtree_end=subtree_end[:count],
        target_node=nodes.joined()[by_id],
        target_predictor=predictors.joined()[by_id],
        target_id=target_id[by_id],
    )


def segments(parents: Ints, positions: Ints, subtree_end: Ints) -> Segments:
    """The maximal unbranched runs of a forest given by int64 arrays [T] in depth-first order."""
    count = len(parents)
    children = np.bincount(parents[parents >= 0], minlength=count) if count else np.zeros(0, np.int64)
    index = np.arange(count)
    goes_on = (parents == index - 1) & (parents >= 0)
    goes_on[goes_on] = children[parents[goes_on]] == 1
    start = np.flatnonzero(~goes_on)
    run_of = np.cumsum(~goes_on) - 1
    above = parents[start]
    return Segments(
        start=start,
        end=np.append(start[1:], count)[: len(start)],
        subtree_end=subtree_end[start],
        parent=np.where(above >= 0, run_of[above], -1),
        depth=positions[start],
    )


def common_prefix(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    """How many first tokens two sequences share."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def left_at(earlier: Sample, prompt_ids: NDArray[np.integer]) -> int | None:
    """Where a later prompt leaves the earlier call's prompt + completion: the index of the first token that differs or is
    missing; None when the prompt goes on from the whole of it."""
    sequence = np.concatenate([earlier.prompt_ids, earlier.completion_ids])
    shared = common_prefix(sequence, prompt_ids)
    return None if shared == len(sequence) else shared


def _sort_key(sample: Sample) -> tuple[bytes, int, int]:
    # Big-endian bytes of non-negative ids sort like the ids; equal sequences are ordered by where sampling began.
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(">u4")
    return ids.tobytes(), len(sample.prompt_ids), sample.offset


class _Growing:
    """An int64 array that grows by pieces."""

    def __init__(self) -> None:
        self._pieces: list[Ints] = []

    def add(self, piece: Ints) -> None:
        self._pieces.append(piece)

    def joined(self) -> Ints:
        return np.concatenate([np.zeros(0, np.int64), *self._pieces]).astype(np.int64)
