"""The scenarios of a run: from a file, from a list, or generated, probed with the untrained model, and stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from offbook import LocalBackend, TrainableModel, TrajectoryGroup, gather_trajectory_groups
from offbook.base.errors import ConfigError, RolloutError
from offbook.base.server_options import default_dir
from offbook.base.user_values import as_list
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


ALWAYS_SOLVED = "every rollout solved it"
NEVER_SOLVED = "no rollout solved it"


def set_aside(scenarios: ScenarioSet, success_rates: Mapping[str, float]) -> ScenarioSet:
    """Remove the training scenarios whose success rate is 0 or 1, and count them in `dropped`.

    `success_rates` has the share of solved rollouts by scenario id. Held-out scenarios and those without a rate stay. Raises
    ConfigError for a rate outside 0 to 1, an unknown id, or if no training scenario is left.
    """
    unknown = set(success_rates) - {scenario.id for scenario in scenarios.scenarios}
    if unknown:
        raise ConfigError(f"success_rates: there is no scenario {min(unknown)!r}")
    for name, rate in success_rates.items():
        if not 0 <= rate <= 1:
            raise ConfigError(f"success_rates: a share from 0 to 1 is needed for {name!r}, got {rate!r}")
    dropped = Counter(dict(scenarios.dropped))
    kept: list[McpScenario] = []
    for scenario in scenarios.scenarios:
        rate = success_rates.get(scenario.id) if scenario.split == "train" else None
        if rate == 0:
            dropped[NEVER_SOLVED] += 1
        elif rate == 1:
            dropped[ALWAYS_SOLVED] += 1
        else:
            kept.append(scenario)
    if scenarios.train and not any(scenario.split == "train" for scenario in kept):
        never, always = dropped[NEVER_SOLVED], dropped[ALWAYS_SOLVED]
        raise ConfigError(
            f"scenarios: none teaches this model anything: of {never} no rollout solved any, of {always} every one did; "
            "make easier ones (`offbook mcp scenarios TARGET --max-difficulty 1 -o FILE`) or harder ones and train with "
            "--scenarios FILE, or probe with more rollouts of each (--set probe=N)"
        )
    return replace(scenarios, scenarios=tuple(kept), dropped=dict(dropped))


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
