"""Runs one rollout of a scenario: sessions, agent loop, reward. A rollout with a server failure is unscored."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, cast

from offbook import TrainableModel, Trajectory
from offbook.base.errors import CaptureError, ConfigError
from offbook.base.text import counted
from offbook.base.types import as_rollout_exception
from offbook.client.endpoint_model import FixedStepModel
from offbook.client.rollouts.capture import capturing
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.servers import ROLLOUT_DIR
from offbook_mcp.scenarios.scenario import McpScenario
from offbook_mcp.tools.rollout_tools import RolloutTools
from offbook_mcp.tools.toolset import Toolset

from .agent_loop import SYSTEM, AgentLoop, LoopOptions
from .rewards import score


@dataclass(frozen=True)
class McpRollout:
    """The rollout function for a Trainer: `await rollout(model, scenario)`.

    max_tools: the number of tools that the model sees, the expected ones and others drawn with `seed`; None: all.
    result_chars: limit for a tool's result, if it is below the target's.
    step_tokens: the limit of one message of a step in a comparison, which other LLMs do not share; None: theirs.
    """

    pool: ServerPool
    loop: LoopOptions = field(default_factory=LoopOptions)
    max_tools: int | None = None
    result_chars: int | None = None
    seed: int = 0
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
        seed = zlib.crc32(f"{self.seed} {scenario.id}".encode())
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
    trajectory.tool_runs = loop.clock.runs()
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
