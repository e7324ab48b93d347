"""Where the scenarios of a run come from: a file, a list, or made on the spot and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from understudy import LocalBackend, TrainableModel
from understudy.integration import ConfigError

from ..connection.pool import ServerPool
from ..scenarios.files import ScenarioSet, load_scenarios
from ..scenarios.scenario import CheckKind, McpScenario
from .rollout import check_scenarios

ScenariosLike: TypeAlias = ScenarioSet | Sequence[McpScenario] | Path | str | None
"""Scenarios, the file that holds them, or None: those of the model's file, which is made where there is none."""


def scenario_file(model: TrainableModel) -> Path:
    """Where the scenarios of a model are kept that were made for it: beside its server's records, where that is here."""
    folder = model.backend.dir if isinstance(model.backend, LocalBackend) else Path(".understudy").absolute()
    return folder / "mcp" / f"{model.name}.jsonl"


def as_set(scenarios: ScenarioSet | Sequence[McpScenario] | Path | str) -> ScenarioSet:
    """Scenarios that exist. Raises ConfigError."""
    if isinstance(scenarios, ScenarioSet):
        return scenarios
    if isinstance(scenarios, Path | str):
        return load_scenarios(scenarios)
    listed = tuple(scenarios)
    wrong = next((each for each in listed if not isinstance(each, McpScenario)), None)  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
    if wrong is not None:
        raise ConfigError(f"scenarios: McpScenarios are needed, got {type(wrong).__name__} {wrong!r:.100}")
    return ScenarioSet(listed, next((each.server for each in listed if each.server), ""))


def check_usable(
    scenarios: ScenarioSet, pool: ServerPool, max_tools: int | None, judged: bool, *, trained: bool = True
) -> None:
    """Raise ConfigError for scenarios that cannot be run on this target, or not be scored; where it is `trained` on them, also
    for those that are all held out."""
    if trained and not scenarios.train:
        raise ConfigError(f"scenarios: none of {len(scenarios.scenarios)} is for training; their split is 'eval'")
    check_scenarios(list(scenarios.scenarios), pool.toolset, max_tools)
    for_judge = [each for each in scenarios.scenarios if each.check is CheckKind.JUDGE]
    if for_judge and not judged:
        raise ConfigError(
            f"scenarios: {len(for_judge)} of {len(scenarios.scenarios)} can only be scored by a judge: pass "
            "judge=understudy.Ruler(...), or --judge MODEL"
        )
