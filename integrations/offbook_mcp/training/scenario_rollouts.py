"""The scenarios of a run, their rollouts, and the judge of those that cannot be executed.

A rollout is: sessions, agent loop, reward. One with a server failure is unscored.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from offbook import LocalBackend, TrainableModel, Trajectory, TrajectoryGroup
from offbook.base.errors import CaptureError, ConfigError, RolloutError
from offbook.base.server_options import default_dir
from offbook.base.text import counted
from offbook.base.types import as_rollout_exception
from offbook.base.user_values import as_list
from offbook.client.model import FixedStepModel
from offbook.client.rollouts.capture import capturing
from offbook.contracts import Judge
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.servers import ROLLOUT_DIR
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ScenarioSet, load_scenarios
from offbook_mcp.tools.rollout_tools import RolloutTools
from offbook_mcp.tools.toolset import Toolset

from .agent_loop import SYSTEM, AgentLoop, LoopOptions
from .rewards import score


@dataclass(frozen=True)
class McpRollout:
    """The rollout function for a Trainer: `await rollout(model, scenario)`.

    max_tools: the number of tools that the model sees, the expected ones and others drawn by its id; None: all.
    result_chars: limit for a tool's result, if it is below the target's.
    step_tokens: the limit of one message of a step in a comparison, which other LLMs do not share; None: theirs.
    """

    pool: ServerPool
    loop: LoopOptions = field(default_factory=LoopOptions)
    max_tools: int | None = None
    result_chars: int | None = None
    step_tokens: int | None = None

    async def __call__(self, model: TrainableModel, scenario: McpScenario) -> Trajectory:
        """Return the finished trajectory. After a failure it has the exception and the messages so far."""
        trajectory = Trajectory(captured=True, metadata={"scenario_id": scenario.id})
        trajectory.metadata |= {"tools": list(scenario.tools), "difficulty": scenario.difficulty}
        with capturing(trajectory):
            try:
                await self._run(model, scenario, trajectory)
            except CaptureError:
                raise
            except Exception as error:  # noqa: BLE001  # a failed rollout is data, kept with its traceback
                trajectory.reward = None
                trajectory.exception = as_rollout_exception(error)
        return trajectory.finish()

    def shown(self, scenario: McpScenario) -> Toolset:
        """The tools that the model sees in every rollout of this scenario. Raises ConfigError."""
        seed = zlib.crc32(f"0 {scenario.id}".encode())
        return self.pool.toolset.shown(scenario.tools, self.max_tools, seed)

    async def _run(self, model: TrainableModel, scenario: McpScenario, trajectory: Trajectory) -> None:
        shown = self.shown(scenario)
        trajectory.tools = shown.functions()
        async with self.pool.rollout() as leased:
            own = self.pool.target.limits.result_chars
            tools = restricted(leased, shown, own if self.result_chars is None else min(own, self.result_chars))
            trajectory.messages_and_choices = cast(Any, opening(scenario, tools))
            options = self.loop
            if self.step_tokens is not None and isinstance(model, FixedStepModel):
                options = replace(options, max_completion_tokens=self.step_tokens)
            loop = AgentLoop(model.openai_client(), model.inference_name(), tools, options)
            try:
                episode = await loop.run(trajectory)
            finally:
                record_calls(trajectory, loop)
        result = score(scenario, episode, shown)
        trajectory.reward = result.reward
        trajectory.metrics |= result.metrics
        trajectory.metadata["ended"] = episode.end.value


def opening(scenario: McpScenario, tools: RolloutTools) -> list[dict[str, object]]:
    """The first messages: the system prompt, and the task with the rollout's folder filled in."""
    task = scenario.task.replace(ROLLOUT_DIR, str(tools.folder)) if tools.folder is not None else scenario.task
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]


def restricted(tools: RolloutTools, shown: Toolset, limit: int) -> RolloutTools:
    """The rollout's tools, limited to those that the model sees, with results of at most `limit` characters."""
    return RolloutTools(shown, tools.sessions, tools.folder, replace(tools.limits, result_chars=limit))


def record_calls(trajectory: Trajectory, loop: AgentLoop) -> None:
    """Store the tool calls and their times on the trajectory."""
    trajectory.tool_runs = loop.tool_runs()
    trajectory.metadata["tool_calls"] = [record.as_json() for record in loop.records]
    trajectory.metrics["tool_seconds"] = sum(record.seconds for record in loop.records)


def check_scenarios(scenarios: list[McpScenario], toolset: Toolset, max_tools: int | None) -> None:
    """Raise ConfigError for scenarios that no rollout can solve: with unknown tools, or with more tools than `max_tools`."""
    known = {tool.name for tool in toolset.tools}
    missing = Counter(name for scenario in scenarios for name in set(scenario.tools) if name not in known)
    if missing:
        name, count = missing.most_common(1)[0]
        reason = f" ({toolset.left_out[name]})" if name in toolset.left_out else ""
        raise ConfigError(
            f"scenarios: {count} of {len(scenarios)} use the tool {name!r}, which the target does not offer{reason}; it has "
            f"{', '.join(sorted(known))}: make scenarios for this target, or check --only"
        )
    if max_tools is None:
        return
    for scenario in scenarios:
        if len(scenario.tools) > max_tools:
            raise ConfigError(
                f"max_tools: scenario {scenario.id!r} needs {counted(len(scenario.tools), 'tool')}, {max_tools} may be shown"
            )


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
