"""The scenarios of a run, from a file or a list, and the judge of those that cannot be executed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from offbook import LocalBackend, TrainableModel, Trajectory, TrajectoryGroup
from offbook.base.errors import ConfigError, RolloutError
from offbook.base.server_options import default_dir
from offbook.base.user_values import as_list
from offbook.contracts import Judge
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.rollouts.rollout import McpRollout, check_scenarios
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ScenarioSet, load_scenarios

ScenariosLike: TypeAlias = ScenarioSet | Sequence[McpScenario] | Path | str | None
"""Scenarios, their file, or None for the model's own file, which is generated if it does not exist."""


def scenario_file(model: TrainableModel) -> Path:
    """The file with the scenarios generated for a model: in its server's directory if that is local, else in the default."""
    folder = model.backend.dir if isinstance(model.backend, LocalBackend) else default_dir()
    return folder / "mcp" / f"{model.name}.jsonl"


def as_set(scenarios: ScenarioSet | Sequence[McpScenario] | Path | str) -> ScenarioSet:
    """Convert scenarios, or load their file. Raises ConfigError."""
    if isinstance(scenarios, ScenarioSet):
        return scenarios
    if isinstance(scenarios, Path | str):
        return load_scenarios(scenarios)
    listed = tuple(as_list(scenarios, "scenarios"))
    wrong = next((scenario for scenario in listed if not isinstance(scenario, McpScenario)), None)  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
    if wrong is not None:
        raise ConfigError(f"scenarios: McpScenarios are needed, got {type(wrong).__name__} {wrong!r:.100}")
    return ScenarioSet(listed, next((scenario.server for scenario in listed if scenario.server), ""))


def check_usable(
    scenarios: ScenarioSet, pool: ServerPool, max_tools: int | None, judged: bool, *, trained: bool = True
) -> None:
    """Raise ConfigError for scenarios that cannot be run on this target or cannot be scored.

    With `trained`, also if none of them is for training.
    """
    if trained and not scenarios.train:
        raise ConfigError(f"scenarios: none of {len(scenarios.scenarios)} is for training; their split is 'eval'")
    check_scenarios(list(scenarios.scenarios), pool.toolset, max_tools)
    for_judge = [scenario for scenario in scenarios.scenarios if scenario.check is CheckKind.JUDGE]
    if for_judge and not judged:
        raise ConfigError(
            f"scenarios: {len(for_judge)} of {len(scenarios.scenarios)} can only be scored by a judge: pass "
            "judge=offbook.Ruler(...), or --judge MODEL"
        )


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
