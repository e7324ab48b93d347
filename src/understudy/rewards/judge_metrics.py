"""What judges log of groups and trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from understudy.types import Metric, Trajectory

TIE = "judge/tie"
"""Of a group: 1 where all rewards are equal, so that nothing can be learned."""
CUT = "judge/cut"
"""Of a group: 1 where texts were shortened to `max_prompt_tokens`."""
DISAGREEMENT = "judge/disagreement"
"""Of a trajectory: the standard deviation of its judges' scores; of a group: the mean of that."""
GATE = "judge/gate"
"""Of a trajectory: 1 where it passed the gate, 0 where it was not shown to the judge."""


def tie(trajectories: Iterable[Trajectory]) -> dict[str, Metric]:
    """Whether all scored trajectories, two at least, have one reward."""
    rewards = [each.reward for each in trajectories if each.reward is not None]
    return {TIE: float(len(rewards) > 1 and len(set(rewards)) == 1)}


def merged(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of several judgements: of each the mean over those that have it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: fmean(each) for name, each in values.items()}
