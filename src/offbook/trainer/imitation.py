"""The good rollouts of a run's models so far, from which steps with `min_reward` imitate some again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from offbook.base.config import TrainConfig
from offbook.base.types import TrajectoryGroup
from offbook.base.wire import TrajectoryQuery
from offbook.client.model import TrainableModel

REMEMBERED = 10_000
"""Rollouts of one model, the newest."""
_PAGE = 1_000


@dataclass
class Replay:
    """Draws the rollouts of earlier steps that each model imitates again. It knows their ids and rewards; the server has
    the rollouts, so a run that is started again draws from those of the earlier one too."""

    models: Sequence[TrainableModel]
    count: int  # at most, for each step
    seed: int
    _rewards: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])

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
            if model.name not in self._rewards:
                self._rewards[model.name] = await _recorded(model)
            known = self._rewards[model.name].items()
            good = [name for name, reward in known if reward >= least and name not in own]
            numbers = random.Random(f"{self.seed} {steps[model.name]}")
            chosen[model.name] = numbers.sample(good, min(self.count, len(good)))
        return chosen

    def add(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Remember the rollouts of an iteration. Models that have imitated nothing yet read theirs when they do."""
        scored = {each.id: float(each.reward) for group in groups for each in group if each.reward is not None}
        for rewards in self._rewards.values():
            rewards |= scored
            for oldest in list(rewards)[:-REMEMBERED]:
                del rewards[oldest]


async def _recorded(model: TrainableModel) -> dict[str, float]:
    """The rewards of the rollouts that the model was trained on so far, oldest first."""
    api, found, after = await model.api(), dict[str, float](), None
    while len(found) < REMEMBERED:
        query = TrajectoryQuery(model=model.name, split="train", scored=True, failed=False, limit=_PAGE, after=after)
        page = await api.trajectories(query)
        found |= {each.id: each.reward for each in page.trajectories if each.reward is not None}
        after = page.next
        if after is None:
            break
    return dict(reversed(found.items()))
