"""Removes scenarios without a training signal: those that every rollout or no rollout solves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from offbook.base.errors import ConfigError
from offbook_mcp.scenarios.files import ScenarioSet
from offbook_mcp.scenarios.scenario import McpScenario

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
            "--scenarios FILE, or probe with more rollouts of each (--probe)"
        )
    return replace(scenarios, scenarios=tuple(kept), dropped=dict(dropped))
