"""Finds the sampled tokens of a rollout that are targets of several calls, and the advantages of these."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from offbook.engine.token_file import TokenFile, TrainedCall

from .numbers import TIMES, signed


@dataclass(frozen=True)
class SharedRun:
    """Tokens `start` to `end` (exclusive) of an answer that are targets of several calls. `text` lists their advantages."""

    start: int
    end: int
    text: str


def shared_runs(file: TokenFile, trajectory: str) -> dict[tuple[str, int], tuple[SharedRun, ...]]:
    """The shared runs of tokens of a trajectory, by call id and choice."""
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
    shared: list[SharedRun] = []
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
                shared.append(SharedRun(start - first, stop - first, _listed(targets)))
    return shared


def _listed(targets: Sequence[TrainedCall]) -> str:
    """The advantages, each with the number of targets that have it."""
    counts = Counter(signed(target.advantage) for target in targets)
    return ", ".join(f"{advantage} {TIMES}{count}" for advantage, count in counts.items())
