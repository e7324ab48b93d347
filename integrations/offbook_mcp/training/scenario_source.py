"""The scenarios of a run: from a file, from a list, or generated and stored."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from offbook import LocalBackend, TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.server_options import default_dir
from offbook.base.user_values import as_list
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.rollouts.rollout import check_scenarios
from offbook_mcp.scenarios.files import ScenarioSet, load_scenarios
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario

ScenariosLike: TypeAlias = ScenarioSet | Sequence[McpScenario] | Path | str | None
"""Scenarios, their file, or None for the model's own file, which is generated if it does not exist."""


_DRAFT_DIGITS = 8
"""Digits of the hash in a draft's name. A pattern of just these does not match a draft of the model `a.b` for `a`."""


def scenario_file(model: TrainableModel) -> Path:
    """The file with the scenarios generated for a model: in its server's directory if that is local, else in the default."""
    folder = model.backend.dir if isinstance(model.backend, LocalBackend) else default_dir()
    return folder / "mcp" / f"{model.name}.jsonl"


def draft_file(model: TrainableModel, options: Sequence[object]) -> Path:
    """Scenarios that were generated with these options for a model and not probed yet, beside its `scenario_file`."""
    made_with = hashlib.sha256(repr(tuple(options)).encode()).hexdigest()[:_DRAFT_DIGITS]
    return scenario_file(model).with_suffix(f".{made_with}.draft.jsonl")


def remove_drafts(model: TrainableModel) -> None:
    """Remove all drafts of a model, once its scenarios are kept."""
    file = scenario_file(model)
    for draft in file.parent.glob(f"{glob.escape(file.stem)}.{'[0-9a-f]' * _DRAFT_DIGITS}.draft.jsonl"):
        draft.unlink(missing_ok=True)


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
