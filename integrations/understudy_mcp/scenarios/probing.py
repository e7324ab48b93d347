"""Scenarios that teach nothing are set aside: those that every or no rollout solves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from understudy.integration import ConfigError

from .files import ScenarioSet
from .scenario import McpScenario

ALWAYS_SOLVED = "every rollout solved it"
NEVER_SOLVED = "no rollout solved it"


def set_aside(scenarios: ScenarioSet, success_rates: Mapping[str, float]) -> ScenarioSet:
    """The set without training scenarios whose rate (id -> share of its rollouts that solved it) is 0 or 1, counted in
    `dropped`. Held-out scenarios stay, as do those without a rate. Raises ConfigError for a rate that is none, an unknown
    id, or where nothing to train on would be left."""
    unknown = set(success_rates) - {each.id for each in scenarios.scenarios}
    if unknown:
        raise ConfigError(f"success_rates: there is no scenario {min(unknown)!r}")
    for name, rate in success_rates.items():
        if not 0 <= rate <= 1:
            raise ConfigError(f"success_rates: a share from 0 to 1 is needed for {name!r}, got {rate!r}")
    dropped = Counter(dict(scenarios.dropped))
    kept: list[McpScenario] = []
    for each in scenarios.scenarios:
        rate = success_rates.get(each.id) if each.split == "train" else None
        if rate == 0:
            dropped[NEVER_SOLVED] += 1
        elif rate == 1:
            dropped[ALWAYS_SOLVED] += 1
        else:
            kept.append(each)
    if scenarios.train and not any(each.split == "train" for each in kept):
        never, always = dropped[NEVER_SOLVED], dropped[ALWAYS_SOLVED]
        raise ConfigError(
            f"scenarios: none teaches this model anything: of {never} no rollout solved any, of {always} every one did; "
            "use easier ones (--max-difficulty 1), harder ones, or probe with more rollouts of each"
        )
    return replace(scenarios, scenarios=tuple(kept), dropped=dict(dropped))
