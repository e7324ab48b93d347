"""Which sampled tokens of a rollout are targets of other calls too, with which advantages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...engine.token_file import TokenFile, TrainedCall
from .numbers import TIMES, signed


@dataclass(frozen=True)
class SharedRun:
    """Tokens `start` to `end` of an answer are targets of several calls; `text` lists their advantages."""

    start: int
    end: int
    text: str


def shared_runs(file: TokenFile, trajectory: str) -> dict[tuple[str, int], tuple[SharedRun, ...]]:
    """By call and choice of a trajectory: the runs of its tokens that lie on nodes of the tree with other targets."""
    calls = file.head.calls
    passing: dict[int, list[TrainedCall]] = defaultdict(list)
    paths = {id(call): file.path(call.leaf) for call in calls}
    for call in calls:
        for segment in paths[id(call)]:
            passing[segment].append(call)
    return {
        (call.call_id, call.index): tuple(_runs(file, call, paths[id(call)], passing))
        for call in file.head.calls_of(trajectory)
    }


def _runs(
    file: TokenFile, call: TrainedCall, path: Sequence[int], passing: dict[int, list[TrainedCall]]
) -> list[SharedRun]:
    found: list[SharedRun] = []
    lengths = file.segment_length[list(path)]
    ends = np.cumsum(lengths)
    first, last = call.prompt, call.prompt + call.tokens
    for segment, begin, end in zip(path, (ends - lengths).tolist(), ends.tolist(), strict=True):
        low, high = max(begin, first), min(end, last)
        others = passing[segment]
        if low >= high or len(others) < 2:
            continue
        cuts = {low, high} | {
            edge for other in others for edge in (other.prompt, other.prompt + other.tokens) if low < edge < high
        }
        edges = sorted(cuts)
        for start, stop in pairwise(edges):
            targets = [other for other in others if other.prompt <= start < other.prompt + other.tokens]
            if len(targets) > 1:
                found.append(SharedRun(start - first, stop - first, _listed(targets)))
    return found


def _listed(targets: Sequence[TrainedCall]) -> str:
    """Each advantage, and how many targets have it."""
    counts = Counter(signed(target.advantage) for target in targets)
    return ", ".join(f"{advantage} {TIMES}{count}" for advantage, count in counts.items())
