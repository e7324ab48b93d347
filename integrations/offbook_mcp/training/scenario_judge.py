"""A judge for the scenarios that cannot be executed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from offbook import TrainableModel, Trajectory, TrajectoryGroup
from offbook.base.errors import RolloutError
from offbook.contracts import Judge
from offbook_mcp.rollouts.rollout import McpRollout
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario

ScenarioRollout: TypeAlias = Callable[[TrainableModel, McpScenario], Awaitable[Trajectory]]


def unjudged(rollout: McpRollout) -> ScenarioRollout:
    """The rollout function without a reward for scenarios of CheckKind.JUDGE: the cost of malformed calls alone is not a
    reward."""

    async def run(model: TrainableModel, scenario: McpScenario) -> Trajectory:
        trajectory = await rollout(model, scenario)
        if scenario.check is CheckKind.JUDGE:
            trajectory.reward = None
        return trajectory

    return run


def unused_judge(scenarios: Sequence[McpScenario], judge: Judge | None) -> str:
    """Why a judge would never be asked; "" if it is, or if there is none."""
    if judge is None or any(scenario.check is CheckKind.JUDGE for scenario in scenarios):
        return ""
    return 'not asked, since every scenario is scored by execution; those with "check": "judge" need one'


class ScenarioJudge:
    """A Judge for a Trainer.

    Groups of CheckKind.JUDGE get the judge's score minus the cost of malformed calls. Others keep the reward from execution, and
    the judge is not called.
    """

    def __init__(self, judge: Judge, scenarios: Sequence[McpScenario]) -> None:
        self._judge = judge
        self._checks: Mapping[str, CheckKind] = {scenario.id: scenario.check for scenario in scenarios}

    def __repr__(self) -> str:
        return f"{self._judge!r}, for what cannot be executed"

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        """Return the group with its rewards; None if the judge drops it. Raises the judge's errors."""
        name = str(group.metadata.get("scenario_id"))
        if name not in self._checks:
            raise RolloutError(f"judge: a group of the unknown scenario {name!r}")
        if self._checks[name] is not CheckKind.JUDGE:
            return group
        executed = {trajectory.id: trajectory.reward for trajectory in group}
        judged = await self._judge(group)
        for trajectory in judged or ():
            own = executed.get(trajectory.id)
            if trajectory.reward is not None and own is not None:
                trajectory.metrics["judge_score"] = trajectory.reward
                trajectory.reward += own
        return judged
