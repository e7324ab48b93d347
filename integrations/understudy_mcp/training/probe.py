"""What a model can do before it is trained: scenarios that all or none of its rollouts solve teach nothing."""

from __future__ import annotations

import math
from functools import partial

from understudy import TrainableModel, TrajectoryGroup, gather_trajectory_groups
from understudy.integration import RolloutError

from ..scenarios.files import ScenarioSet
from ..scenarios.probing import set_aside
from ..scenarios.scenario import CheckKind, McpScenario
from .rollout import McpRollout


async def probed(
    scenarios: ScenarioSet, rollout: McpRollout, model: TrainableModel, rollouts: int, concurrency: int
) -> ScenarioSet:
    """The set without training scenarios that every or none of `rollouts` solved; those for a judge stay. The rollouts are
    kept with the model, as split `probe`. Raises ConfigError where nothing is left, RolloutError where none was scored."""
    asked = [each for each in scenarios.train if each.check is not CheckKind.JUDGE]
    groups = await gather_trajectory_groups(
        [_group(each, rollout, model, rollouts) for each in asked],
        pbar_desc="probe",
        concurrency=concurrency,
        max_exceptions=len(asked) * rollouts,
    )
    await model.log(groups, split="probe")
    rates = {str(group.metadata["scenario_id"]): rate for group in groups if (rate := success_rate(group)) is not None}
    if asked and not rates:
        failed = next((each.exception for group in groups for each in group if each.exception), None)
        raise RolloutError(
            f"probe: no rollout was scored: {failed.type}: {failed.message}" if failed else "probe: none"
        )
    return set_aside(scenarios, rates)


def success_rate(group: TrajectoryGroup) -> float | None:
    """The share of scored rollouts that solved it; None where none was scored."""
    scored = [float(each.metrics["success"]) for each in group if each.reward is not None and "success" in each.metrics]
    return math.fsum(scored) / len(scored) if scored else None


def _group(scenario: McpScenario, rollout: McpRollout, model: TrainableModel, rollouts: int) -> TrajectoryGroup:
    copies = [partial(rollout, model, scenario)] * rollouts
    return TrajectoryGroup(copies, metadata={"scenario_id": scenario.id})
