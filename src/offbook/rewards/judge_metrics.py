"""The metrics that judges log for groups and trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from offbook.base.rounding import distinct
from offbook.base.types import Metric, Trajectory

TIE = "judge/tie"
"""Of a group: 1 if all rewards are equal up to rounding, so that it trains nothing, else 0."""
CUT = "judge/cut"
"""Of a group: 1 if texts were shortened to fit `max_prompt_tokens`, else 0."""
DISAGREEMENT = "judge/disagreement"
"""Of a trajectory: the standard deviation of its judges' scores. Of a group: the mean over trajectories."""
GATE = "judge/gate"
"""Of a trajectory: 1 if it passed the gate, 0 if not; then the judge does not see it."""


def tie(trajectories: Iterable[Trajectory]) -> dict[str, Metric]:
    """The metric `judge/tie`: 1 if at least two trajectories are scored and all rewards are equal."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    return {TIE: float(len(rewards) > 1 and len(distinct(rewards)) == 1)}


def merged(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The mean of every metric over the judgements that have it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: fmean(numbers) for name, numbers in values.items()}
