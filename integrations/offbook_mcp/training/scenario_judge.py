"""Combines a judge with rewards from execution: for scenarios that cannot be executed, or as a share of every reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from offbook import TrainableModel, Trajectory, TrajectoryGroup
from offbook.base.errors import RolloutError
from offbook.contracts import Judge
from offbook_mcp.rollouts.rollout import McpRollout
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario

SHARE = 0.5
"""Weight of the judge's score in the reward of a scenario that is scored by both."""


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


def unused_judge(scenarios: Sequence[McpScenario], judge: Judge | None, *, judge_all: bool) -> str:
    """Why a judge would never be asked; "" if it is, or if there is none."""
    if judge is None or judge_all or any(scenario.check is CheckKind.JUDGE for scenario in scenarios):
        return ""
    return "not asked, since every scenario is scored by execution; --judge-all makes it half of every reward"


class ScenarioJudge:
    """A Judge for a Trainer.

    Groups of CheckKind.JUDGE get the judge's score minus the cost of malformed calls. With `judge_all`, other groups get the
    mean of both rewards. Otherwise they keep the reward from execution, and the judge is not called.
    """

    def __init__(self, judge: Judge, scenarios: Sequence[McpScenario], *, judge_all: bool = False) -> None:
        self._judge = judge
        self._checks: Mapping[str, CheckKind] = {scenario.id: scenario.check for scenario in scenarios}
        self._judge_all = judge_all

    def __repr__(self) -> str:
        return f"{self._judge!r}, for {'all' if self._judge_all else 'what cannot be executed'}"

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        """Return the group with its rewards; None if the judge drops it. Raises the judge's errors."""
        name = str(group.metadata.get("scenario_id"))
        if name not in self._checks:
            raise RolloutError(f"judge: a group of the unknown scenario {name!r}")
        only = self._checks[name] is CheckKind.JUDGE
        if not only and not self._judge_all:
            return group
        executed = {trajectory.id: trajectory.reward for trajectory in group}
        judged = await self._judge(group)
        for trajectory in judged or ():
            own = executed.get(trajectory.id)
            if trajectory.reward is not None and own is not None:
                trajectory.metrics["judge_score"] = trajectory.reward
                trajectory.reward = trajectory.reward + own if only else SHARE * trajectory.reward + (1 - SHARE) * own
        return judged
