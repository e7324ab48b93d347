"""The good rollouts of a run's models so far, from which steps with `min_reward` imitate some again."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from offbook.base.config import TrainConfig
from offbook.base.numbers import reaches
from offbook.base.types import TrajectoryGroup
from offbook.base.wire import TrajectoryQuery
from offbook.client.model import TrainableModel

REMEMBERED = 10_000
"""Rollouts of one model, the newest."""
SOLVED = 0.05
"""The weight, in the draw, of a good rollout whose group was all good. Without any, what was solved may be forgotten."""
_PAGE = 1_000


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout's id, the name of its group, and its reward; minus infinity if it failed or was not scored."""

    id: str
    group: str
    reward: float


def draw(rollouts: Iterable[ScoredRollout], least: float, count: int, numbers: random.Random) -> list[str]:
    """Ids of up to `count` good rollouts, each once, by weight: the largest u ** (1 / weight) of uniform u (Efraimidis and
    Spirakis 2006)."""
    groups: dict[str, list[ScoredRollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    keys: dict[str, float] = {}
    for members in groups.values():
        good = [rollout.id for rollout in members if math.isfinite(rollout.reward) and reaches(rollout.reward, least)]
        weight = 1 - len(good) / len(members) + SOLVED
        keys |= {name: numbers.random() ** (1 / weight) for name in good}
    return sorted(keys, key=lambda name: -keys[name])[:count]


@dataclass
class Replay:
    """Draws the rollouts of earlier steps that each model imitates again, rare successes first: the weight of a good rollout
    is the share of its group that was not good. So is a success prioritised that the policy did not expect, in self-imitation
    learning (1806.05635). The server has the rollouts, so a run that is started again draws from those of the earlier one too."""

    models: Sequence[TrainableModel]
    count: int  # at most, for each step
    seed: int
    _known: dict[str, list[ScoredRollout]] = field(default_factory=dict[str, list[ScoredRollout]])

    async def drawn(
        self, configs: Mapping[str, TrainConfig], groups: Sequence[TrajectoryGroup], steps: Mapping[str, int]
    ) -> dict[str, list[str]]:
        """For each model whose next step imitates: ids of good rollouts that are not in `groups`."""
        own = {trajectory.id for group in groups for trajectory in group}
        chosen: dict[str, list[str]] = {}
        for model in self.models:
            least = configs[model.name].min_reward if model.name in configs else None
            if least is None or not self.count:
                continue
            if model.name not in self._known:
                self._known[model.name] = await _recorded(model)
            known = [rollout for rollout in self._known[model.name] if rollout.id not in own]
            chosen[model.name] = draw(known, least, self.count, random.Random(f"{self.seed} {steps[model.name]}"))
        return chosen

    def add(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Remember the rollouts of an iteration. Models that have imitated nothing yet read theirs when they do."""
        scored: list[ScoredRollout] = []
        for group in groups:
            name = group.trajectories[0].id if group.trajectories else ""
            rewards = [(trajectory.id, trajectory.reward) for trajectory in group.trajectories]
            rewards += [(f"{name} failed {number}", None) for number in range(len(group.exceptions))]
            scored += [ScoredRollout(id, name, _as_float(reward)) for id, reward in rewards]
        for known in self._known.values():
            known += scored
            del known[:-REMEMBERED]


def _as_float(reward: float | None) -> float:
    return -math.inf if reward is None else float(reward)


async def _recorded(model: TrainableModel) -> list[ScoredRollout]:
    """The rollouts of the model's trainings so far, oldest first."""
    api, newest, after = await model.api(), list[ScoredRollout](), None
    while len(newest) < REMEMBERED:
        query = TrajectoryQuery(model=model.name, split="train", limit=_PAGE, after=after)
        page = await api.trajectories(query)
        for record in page.trajectories:
            reward = _as_float(None if record.exception is not None else record.reward)
            newest.append(ScoredRollout(record.id, f"{record.place.run} {record.place.group}", reward))
        after = page.next
        if after is None:
            break
    return newest[::-1]
