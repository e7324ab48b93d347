"""The token tree: all calls of a minibatch as one forest of shared prefixes, in depth-first order. Pure numpy.

Token q sees token k iff k <= q < subtree_end[k]. A sampled token is a *target* once per call that sampled it, even if
several calls share its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbook.base.errors import ConfigError

if TYPE_CHECKING:
    from .protocol import Sample

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """Maximal unbranched runs of a forest of T tokens, in depth-first order; all arrays int64 [S].

    Run s holds the tokens start[s]..end[s]-1. Its subtree ends before token subtree_end[s]. `parent` is the number of
    the run above it (-1: a root), `depth` the position of its first token."""

    start: Ints
    end: Ints
    subtree_end: Ints
    parent: Ints
    depth: Ints

    def __len__(self) -> int:
        return len(self.start)

    @property
    def positions(self) -> Ints:
        """Every token's depth, int64 [T]."""
        return np.arange(int(self.end[-1])) + np.repeat(self.depth - self.start, self.end - self.start)


@dataclass(frozen=True)
class TokenTree:
    """A forest of T tokens in depth-first order, and its N targets in order of their numbers. All arrays are int64.

    Turn 1 sampled (3, 4) after the prompt (1, 2). Turn 2 continues it: its prompt is (1, 2, 3, 4, 5), and it sampled
    (6). Another rollout sampled (7) after the same prompt (1, 2). The forest stores the shared tokens once:

    >>> from offbook.engine.protocol import Sample
    >>> def sample(prompt, completion):
    ...     return Sample.bare(np.array(prompt, np.int32), np.array(completion, np.int32))
    >>> calls = numbered([sample([1, 2], [3, 4]), sample([1, 2, 3, 4, 5], [6]), sample([1, 2], [7])])
    >>> tree = build_tree(calls)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([1, 2, 3, 4, 5, 6, 7], [-1, 0, 1, 2, 3, 4, 1])
    >>> tree.subtree_end.tolist()  # token 7 sees 1, 2 and itself
    [7, 7, 6, 6, 6, 6, 7]

    Targets are 3 and 4 (call 0), 6 (call 1) and 7 (call 2). Token 5 was not sampled, so it is no target:

    >>> tree.token_ids[tree.target_node].tolist(), tree.token_ids[tree.target_predictor].tolist()
    ([3, 4, 6, 7], [2, 3, 5, 2])
    """

    token_ids: Ints  # [T]
    positions: Ints  # [T], depth; 0 at a root
    parents: Ints  # [T], -1 at a root
    subtree_end: Ints  # [T], the first token after the subtree
    target_node: Ints  # [N], the node of the target's token
    target_predictor: Ints  # [N], the node whose logits predict it
    target_number: Ints  # [N], its number in the step

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def leaves(self) -> Ints:
        """Tokens without children, ascending, int64."""
        return np.flatnonzero(self.subtree_end == np.arange(len(self)) + 1)

    def segments(self) -> Segments:
        """The tree's maximal unbranched runs."""
        return segments(self.parents, self.positions, self.subtree_end)


def numbered(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Copies of the samples with `offset` set, so that their targets are numbered 0..N-1 in order."""
    lengths = np.array([len(sample.completion_ids) for sample in samples], np.int64)
    starts = (np.cumsum(lengths) - lengths).tolist()
    return tuple(replace(sample, offset=start) for sample, start in zip(samples, starts, strict=True))


def build_tree(samples: Sequence[Sample]) -> TokenTree:
    """Merge the calls of a step into one forest; see `TokenTree` for an example. The order of `samples` does not matter.
    Raises ConfigError for an empty prompt."""
    order = sorted(range(len(samples)), key=lambda i: _sort_key(samples[i]))
    tokens, parents, positions = _Growing(), _Growing(), _Growing()
    size = max((sample.length for sample in samples), default=0)
    total = sum(sample.length for sample in samples)
    path = np.zeros(size, np.int64)  # node of the current sample at each depth
    subtree_end = np.zeros(total, np.int64)
    before = np.zeros(0, np.int64)
    nodes, predictors, numbers = _Growing(), _Growing(), _Growing()
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
        numbers.add(np.arange(sample.offset, sample.offset + len(sample.completion_ids)))
        before = sequence
    subtree_end[path[: len(before)]] = count
    target_number = numbers.joined()
    by_number = np.argsort(target_number, kind="stable")
    return TokenTree(
        token_ids=tokens.joined(),
        positions=positions.joined(),
        parents=parents.joined(),
        subtree_end=subtree_end[:count],
        target_node=nodes.joined()[by_number],
        target_predictor=predictors.joined()[by_number],
        target_number=target_number[by_number],
    )


def segments(parents: Ints, positions: Ints, subtree_end: Ints) -> Segments:
    """The maximal unbranched runs of a forest. Arguments: int64 [T] in depth-first order."""
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
    """The length of the longest common prefix of two sequences."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


def _sort_key(sample: Sample) -> tuple[bytes, int, int]:
    # Big-endian bytes of non-negative ids sort like the ids; equal sequences are ordered by where sampling began.
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(">u4")
    return ids.tobytes(), len(sample.prompt_ids), sample.offset


class _Growing:
    """Collects arrays that are concatenated at the end."""

    def __init__(self) -> None:
        self._pieces: list[Ints] = []

    def add(self, piece: Ints) -> None:
        self._pieces.append(piece)

    def joined(self) -> Ints:
        return np.concatenate([np.zeros(0, np.int64), *self._pieces]).astype(np.int64)
