"""Judges that combine other judges and reward functions. They are judges themselves, so they can be nested."""

from __future__ import annotations

import asyncio
import inspect
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TypeAlias, cast

from offbook.base.errors import ConfigError, RolloutError
from offbook.base.numbers import distinct
from offbook.base.types import Metric, Trajectory, TrajectoryGroup
from offbook.contracts import Judge

from .reward_result import as_reward
from .ruler_judge import tie

GATE = "judge/gate"
"""Of a trajectory: 1 if it passed the gate, 0 if not; then the judge does not see it."""

TrajectoryReward: TypeAlias = Callable[[Trajectory], object]
"""A trajectory -> a number, a dict of numbers with the key `reward`, or a RewardResult; sync or async."""


class TieJudge:
    """Uses rewards first, and a judge to break ties. The judge scores trajectories of equal reward, up to rounding, among
    themselves.

    A score from 0 to 1 adds at most `share` x the smallest difference between rewards (x 1 if all are equal), so the
    order of different rewards does not change. `reward`: computes a trajectory's reward; None: the reward that it has.
    Raises ConfigError for a share outside 0 to 1."""

    def __init__(self, judge: Judge, reward: TrajectoryReward | None = None, *, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"TieJudge: share: a number between 0 and 1 is needed, got {share!r}")
        self._judge = judge
        self._reward = reward
        self._share = share

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        own = [await _rewarded(trajectory, self._reward) for trajectory in group]
        rewards = distinct([trajectory.reward for trajectory in own if trajectory.reward is not None])
        if not rewards:
            raise RolloutError("TieJudge: no trajectory has a reward: set one in the rollout, or pass reward=")
        gap = min((high - low for low, high in pairwise(rewards)), default=1.0)
        classes: list[list[int]] = [[] for _ in rewards]
        for i, trajectory in enumerate(own):
            if trajectory.reward is not None:
                classes[bisect_right(rewards, trajectory.reward) - 1].append(i)
        ties = [indexes for indexes in classes if len(indexes) > 1]
        parts = await asyncio.gather(*(self._judge(_part(group, [own[i] for i in indexes])) for indexes in ties))
        for indexes, part in zip(ties, parts, strict=True):
            if part is None or any(trajectory.reward is None for trajectory in part):
                return None
            for i, judged in zip(indexes, part, strict=True):
                moved = float(own[i].reward or 0.0) + self._share * gap * _from_0_to_1(judged)
                own[i] = judged.model_copy(update={"reward": moved})
        return _joined(group, own, parts)


class GateJudge:
    """Applies a gate before a judge. A trajectory passes if its gate is above 0; the judge scores those that pass. The
    others get the reward `closed`. The metric `judge/gate` is 1 for passed, else 0."""

    def __init__(self, gate: TrajectoryReward, judge: Judge, *, closed: float = 0.0) -> None:
        self._gate = gate
        self._judge = judge
        self._closed = closed

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        own = list(group.trajectories)
        passed: list[int] = []
        for i, trajectory in enumerate(own):
            if trajectory.exception is not None:
                continue
            value = await _value(self._gate, trajectory)
            opened = as_reward(value, "GateJudge: gate").reward > 0
            update: dict[str, object] = {"metrics": {**trajectory.metrics, GATE: float(opened)}}
            own[i] = trajectory.model_copy(update=update if opened else {**update, "reward": self._closed})
            passed += [i] if opened else []
        if not passed:
            return _joined(group, own, [])
        part = await self._judge(_part(group, [own[i] for i in passed]))
        if part is None:
            return None
        for i, judged in zip(passed, part, strict=True):
            own[i] = judged
        return _joined(group, own, [part])


async def _rewarded(trajectory: Trajectory, reward: TrajectoryReward | None) -> Trajectory:
    if reward is None or trajectory.exception is not None:
        return trajectory
    result = as_reward(await _value(reward, trajectory), "TieJudge: reward")
    return trajectory.model_copy(update={"reward": result.reward, "metrics": {**trajectory.metrics, **result.metrics}})


async def _value(function: TrajectoryReward, trajectory: Trajectory) -> object:
    value = function(trajectory)
    return await cast(Awaitable[object], value) if inspect.isawaitable(value) else value


def _from_0_to_1(judged: Trajectory) -> float:
    score = float(judged.reward or 0.0)
    if not 0 <= score <= 1:
        raise ConfigError(f"TieJudge: its judge gave {score!r}; scores from 0 to 1 are needed")
    return score


def _part(group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
    copies = [
        item.model_copy(
            update={"metrics": dict(item.metrics), "metadata": dict(item.metadata), "logs": list(item.logs)}
        )
        for item in trajectories
    ]
    update: dict[str, object] = {"trajectories": copies, "metrics": dict(group.metrics), "logs": list(group.logs)}
    return group.model_copy(update=update)


def _joined(
    group: TrajectoryGroup, trajectories: Sequence[Trajectory], parts: Sequence[TrajectoryGroup | None]
) -> TrajectoryGroup:
    judged = [part for part in parts if part is not None]
    update: dict[str, object] = {
        "trajectories": list(trajectories),
        "metrics": {**merged([part.metrics for part in judged] or [group.metrics]), **tie(trajectories)},
        "logs": _logs(group.logs, [part.logs for part in judged]),
    }
    return group.model_copy(update=update)


def _logs(own: list[str], others: Sequence[list[str]]) -> list[str]:
    """The group's lines, then those that the judges appended to their copies of them."""
    return own + [line for lines in others for line in lines[len(own) :]]


def merged(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The mean of every metric over the judgements that have it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(float(value))
    return {name: fmean(numbers) for name, numbers in values.items()}
