"""A judge beside rewards from execution: it scores what cannot be executed, or has a share in every reward."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from understudy import TrainableModel, Trajectory, TrajectoryGroup
from understudy.integration import Judge, RolloutError

from ..scenarios.scenario import CheckKind, McpScenario
from .rollout import McpRollout

SHARE = 0.5
"""Of the judge in the reward of a scenario that is scored by both."""


def unjudged(rollout: McpRollout) -> Callable[[TrainableModel, McpScenario], Awaitable[Trajectory]]:
    """The rollout function, without a reward where only a judge can tell: what malformed calls cost is none by itself."""

    async def run(model: TrainableModel, scenario: McpScenario) -> Trajectory:
        trajectory = await rollout(model, scenario)
        if scenario.check is CheckKind.JUDGE:
            trajectory.reward = None
        return trajectory

    return run


class ScenarioJudge:
    """A Judge for a Trainer. Groups of CheckKind.JUDGE get the judge's score, less what malformed calls cost; with
    `judge_all` the others get the mean of both; else they keep the reward from execution, and the judge is not asked."""

    def __init__(self, judge: Judge, scenarios: Sequence[McpScenario], *, judge_all: bool = False) -> None:
        self._judge = judge
        self._checks: Mapping[str, CheckKind] = {each.id: each.check for each in scenarios}
        self._judge_all = judge_all

    def __repr__(self) -> str:
        return f"{self._judge!r}, for {'all' if self._judge_all else 'what cannot be executed'}"

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        """The group with its rewards. Raises what the judge raises."""
        name = str(group.metadata.get("scenario_id"))
        if name not in self._checks:
            raise RolloutError(f"judge: a group of the unknown scenario {name!r}")
        only = self._checks[name] is CheckKind.JUDGE
        if not only and not self._judge_all:
            return group
        executed = {each.id: each.reward for each in group}
        judged = await self._judge(group)
        for each in judged or ():
            own = executed.get(each.id)
            if each.reward is not None and own is not None:
                each.metrics["judge_score"] = each.reward
                each.reward = each.reward + own if only else SHARE * each.reward + (1 - SHARE) * own
        return judged
