"""Probes new scenarios with the untrained model. Scenarios that all or none of its rollouts solve have no signal."""

from __future__ import annotations

import math
from functools import partial

from offbook import TrainableModel, TrajectoryGroup, gather_trajectory_groups
from offbook.base.errors import RolloutError
from offbook_mcp.rollouts.rollout import McpRollout

from ..scenarios.files import ScenarioSet
from ..scenarios.scenario import CheckKind, McpScenario
from .training_signal import set_aside


async def probed(
    scenarios: ScenarioSet, rollout: McpRollout, model: TrainableModel, rollouts: int, concurrency: int
) -> ScenarioSet:
    """Remove training scenarios that all or none of `rollouts` rollouts solved. Scenarios for a judge stay.

    The rollouts are logged with the model under the split `probe`. Raises ConfigError if no training scenario is left,
    RolloutError if no rollout was scored.
    """
    executable = [scenario for scenario in scenarios.train if scenario.check is not CheckKind.JUDGE]
    groups = await gather_trajectory_groups(
        [_group(scenario, rollout, model, rollouts) for scenario in executable],
        pbar_desc="probe",
        concurrency=concurrency,
        max_exceptions=len(executable) * rollouts,
    )
    await model.log(groups, split="probe")
    rates = {str(group.metadata["scenario_id"]): rate for group in groups if (rate := success_rate(group)) is not None}
    if executable and not rates:
        failed = next((rollout.exception for group in groups for rollout in group if rollout.exception), None)
        raise RolloutError(
            f"probe: no rollout was scored: {failed.type}: {failed.message}" if failed else "probe: none"
        )
    return set_aside(scenarios, rates)


def success_rate(group: TrajectoryGroup) -> float | None:
    """The share of scored rollouts that solved the scenario; None if none was scored."""
    scored = [
        float(rollout.metrics["success"])
        for rollout in group
        if rollout.reward is not None and "success" in rollout.metrics
    ]
    return math.fsum(scored) / len(scored) if scored else None


def _group(scenario: McpScenario, rollout: McpRollout, model: TrainableModel, rollouts: int) -> TrajectoryGroup:
    copies = [partial(rollout, model, scenario)] * rollouts
    return TrajectoryGroup(copies, metadata={"scenario_id": scenario.id})
