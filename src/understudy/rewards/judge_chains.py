"""Judges made of judges and reward functions. Each is a judge itself, so that they nest."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TypeAlias, cast

from understudy.contracts import Judge
from understudy.errors import ConfigError, RolloutError
from understudy.types import Trajectory, TrajectoryGroup

from .judge_metrics import DISAGREEMENT, GATE, merged, tie
from .outcome import as_reward

TrajectoryReward: TypeAlias = Callable[[Trajectory], object]
"""A trajectory -> a number, a dict of numbers with `reward`, or a RewardResult; sync or async."""


class AverageJudge:
    """Several judges, asked at once: a trajectory's reward is the mean of their scores. A group that one of them cannot
    score is not scored. How far they are apart is the metric `judge/disagreement`."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        if len(judges) < 2:
            raise ConfigError(f"AverageJudge: at least two judges are needed, got {len(judges)}")
        self._judges = tuple(judges)

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        answers = await asyncio.gather(*(judge(_copy(group)) for judge in self._judges))
        judged = [answer for answer in answers if answer is not None]
        if len(judged) < len(answers):
            return None
        averaged = [_averaged(own, opinions) for own, *opinions in zip(group, *judged, strict=True)]
        joined = _joined(group, averaged, judged)
        apart = [float(each.metrics[DISAGREEMENT]) for each in averaged if DISAGREEMENT in each.metrics]
        if apart:
            joined.metrics[DISAGREEMENT] = fmean(apart)
        return joined


class TieJudge:
    """The reward first, the judge for ties: trajectories of equal reward are shown to the judge, apart from the others, and
    its scores move them by less than `share` of the smallest distance between rewards (of 1, where all are equal).

    reward: of each trajectory; None: the reward that it has.
    """

    def __init__(self, judge: Judge, reward: TrajectoryReward | None = None, *, share: float = 0.5) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"TieJudge: share: a number between 0 and 1 is needed, got {share!r}")
        self._judge = judge
        self._reward = reward
        self._share = share

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        own = [await _rewarded(each, self._reward) for each in group]
        rewards = sorted({each.reward for each in own if each.reward is not None})
        if not rewards:
            raise RolloutError("TieJudge: no trajectory has a reward: set one in the rollout, or pass reward=")
        gap = min((high - low for low, high in pairwise(rewards)), default=1.0)
        classes = [[at for at, each in enumerate(own) if each.reward == reward] for reward in rewards]
        ties = [places for places in classes if len(places) > 1]
        parts = await asyncio.gather(*(self._judge(_part(group, [own[at] for at in places])) for places in ties))
        for places, part in zip(ties, parts, strict=True):
            if part is None or any(each.reward is None for each in part):
                return None
            for at, judged in zip(places, part, strict=True):
                moved = float(own[at].reward or 0.0) + self._share * gap * _from_0_to_1(judged)
                own[at] = judged.model_copy(update={"reward": moved})
        return _joined(group, own, parts)


class GateJudge:
    """A gate before a judge: a trajectory that does not pass gets `closed` and is not shown; the judge scores the others.
    The gate is the metric `judge/gate`, 1 for passed."""

    def __init__(self, gate: TrajectoryReward, judge: Judge, *, closed: float = 0.0) -> None:
        self._gate = gate
        self._judge = judge
        self._closed = closed

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        own = list(group.trajectories)
        passed: list[int] = []
        for at, each in enumerate(own):
            if each.exception is not None:
                continue
            value = await _value(self._gate, each)
            opened = as_reward(value, "GateJudge: gate").reward > 0
            update: dict[str, object] = {"metrics": {**each.metrics, GATE: float(opened)}}
            own[at] = each.model_copy(update=update if opened else {**update, "reward": self._closed})
            passed += [at] if opened else []
        if not passed:
            return _joined(group, own, [])
        part = await self._judge(_part(group, [own[at] for at in passed]))
        if part is None:
            return None
        for at, judged in zip(passed, part, strict=True):
            own[at] = judged
        return _joined(group, own, [part])


def _averaged(own: Trajectory, opinions: Sequence[Trajectory]) -> Trajectory:
    """A trajectory with the mean of its judges' scores, each kept as `judge/score_{n}`; unscored where one gave none."""
    scores = [opinion.reward for opinion in opinions if opinion.reward is not None]
    update: dict[str, object] = {"logs": _logs(own.logs, [opinion.logs for opinion in opinions]), "reward": None}
    if len(scores) == len(opinions):
        single = {f"judge/score_{number}": score for number, score in enumerate(scores, 1)}
        metrics = merged([opinion.metrics for opinion in opinions])
        update |= {"reward": fmean(scores), "metrics": {**metrics, **single, DISAGREEMENT: pstdev(scores)}}
    return own.model_copy(update=update)


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


def _copy(group: TrajectoryGroup) -> TrajectoryGroup:
    """A group that a judge may write on."""
    return _part(group, group.trajectories)


def _part(group: TrajectoryGroup, trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
    copies = [
        each.model_copy(
            update={"metrics": dict(each.metrics), "metadata": dict(each.metadata), "logs": list(each.logs)}
        )
        for each in trajectories
    ]
    update: dict[str, object] = {"trajectories": copies, "metrics": dict(group.metrics), "logs": list(group.logs)}
    return group.model_copy(update=update)


def _joined(
    group: TrajectoryGroup, trajectories: Sequence[Trajectory], parts: Sequence[TrajectoryGroup | None]
) -> TrajectoryGroup:
    """The group with these trajectories, and what its judges logged of it or of parts of it."""
    judged = [part for part in parts if part is not None]
    update: dict[str, object] = {
        "trajectories": list(trajectories),
        "metrics": {**merged([part.metrics for part in judged] or [group.metrics]), **tie(trajectories)},
        "logs": _logs(group.logs, [part.logs for part in judged]),
    }
    return group.model_copy(update=update)


def _logs(own: list[str], others: Sequence[list[str]]) -> list[str]:
    """The lines of all, those that they had in common once."""
    return own + [line for each in others for line in each[len(own) :]]
