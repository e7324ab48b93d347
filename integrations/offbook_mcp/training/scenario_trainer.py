"""The Trainer for MCP scenarios: follows the curriculum, and keeps the measurement before training."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

from offbook import TrainableModel, Trainer, TrajectoryGroup
from offbook_mcp.rollouts.rollout import McpRollout
from offbook_mcp.scenarios.scenario import McpScenario

from .curriculum import Curriculum
from .no_gain import RunRecord
from .training_state import Measured, TrainingState


class ScenarioTrainer(Trainer):
    """A Trainer for MCP scenarios. `curriculum` is None if all scenarios are open from the start."""

    def __init__(
        self,
        model: TrainableModel,
        rollout: McpRollout,
        scenarios: Sequence[McpScenario],
        state: TrainingState,
        *,
        follow_curriculum: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, rollout, scenarios, **options)
        self.state = state
        self.curriculum: Curriculum | None = None
        if follow_curriculum:
            self.curriculum = Curriculum.start(scenarios, self.options.scenarios_per_step, state.curriculum)
        self.record = RunRecord(scenarios)
        self._number = 0
        self._kept = state.model_copy()

    async def next_scenarios(self, scenarios: Sequence[object], number: int) -> list[object]:
        """Choose scenarios of the open difficulties. Stores the last iteration's state with the model."""
        self._number = number
        await self.keep_state()
        if self.curriculum is None:
            return await super().next_scenarios(scenarios, number)
        chosen = self.curriculum.open(cast(Sequence[McpScenario], scenarios))
        return await super().next_scenarios(chosen, number - self.curriculum.state.opened_at)

    def examine_rollouts(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Update the record and the curriculum. Returns a line of text when a harder difficulty opens."""
        self.record.add(groups)
        if self.curriculum is None:
            return None
        before = self.curriculum.state
        self.curriculum = self.curriculum.after(successes(groups), self._number)
        now = self.curriculum.state
        if now.level == before.level:
            return None
        rate = now.success.get(before.level)
        known = "" if rate is None else f" (success at {before.level}: {rate:.0%})"
        self.record.opened(now.level, known)
        return f"difficulty {now.level} is open from the next iteration on{known}"

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Store the measurement; the first one is also the measurement before training."""
        step = next((rollout.place.step for group in groups for rollout in group if rollout.place.step is not None), 0)
        scored = sum(any(rollout.reward is not None for rollout in group) for group in groups)
        self.state.after = Measured(step=step, rates=rates(groups), scored=scored)
        if self.state.before is None:
            self.state.before = self.state.after

    async def keep_state(self) -> None:
        """Store curriculum and measurements with the model if they have changed."""
        if self.curriculum is not None:
            self.state.curriculum = self.curriculum.state
        if self.state != self._kept:
            await self.state.keep(self.model)
            self._kept = self.state.model_copy()


def successes(groups: Sequence[TrajectoryGroup]) -> dict[int, list[float]]:
    """The success of every scored rollout, by difficulty."""
    results: defaultdict[int, list[float]] = defaultdict(list)
    for group in groups:
        for rollout in group:
            if rollout.reward is not None and "success" in rollout.metrics:
                results[int(rollout.metadata["difficulty"])].append(float(rollout.metrics["success"]))
    return dict(results)


def rates(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The mean of every metric over scenarios, of the means over a scenario's scored rollouts; as in an Evaluation."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        scored = [rollout for rollout in group if rollout.reward is not None]
        for name in {name for rollout in scored for name in rollout.metrics}:
            own = [float(rollout.metrics[name]) for rollout in scored if name in rollout.metrics]
            values[name].append(math.fsum(own) / len(own))
        if scored:
            values["reward"].append(math.fsum(float(rollout.reward or 0.0) for rollout in scored) / len(scored))
    return {name: math.fsum(own) / len(own) for name, own in sorted(values.items())}
