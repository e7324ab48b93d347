"""Selects scenarios, balanced over tools and difficulties."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from .scenario import McpScenario
from .split import combinations

_SHARES = {1: 0.32, 2: 0.3, 3: 0.16, 4: 0.15, 5: 0.07}
"""Target shares of the difficulties."""
_MOST_WITHOUT_ARGUMENTS = 3


def select(scenarios: Sequence[McpScenario], count: int, rng: random.Random) -> list[McpScenario]:
    """Select up to `count` scenarios, spread over tools and difficulties.

    At most _MOST_WITHOUT_ARGUMENTS share a call without arguments, since they all end up in the same split.
    """
    waiting = list(scenarios)
    rng.shuffle(waiting)
    tools: Counter[str] = Counter()
    difficulties: Counter[int] = Counter()
    bare: Counter[str] = Counter()
    chosen: list[McpScenario] = []

    def cost(scenario: McpScenario) -> float:
        rarest = min((tools[tool] for tool in scenario.tools), default=0)
        busiest = max((tools[tool] for tool in scenario.tools), default=0)
        return (
            rarest + 0.3 * busiest + difficulties[scenario.difficulty] / (len(_SHARES) * _SHARES[scenario.difficulty])
        )

    while waiting and len(chosen) < count:
        best = min(waiting, key=cost)
        waiting.remove(best)
        empty = [key for key in combinations(best) if key.endswith(", {}]")]
        if any(bare[key] >= _MOST_WITHOUT_ARGUMENTS for key in empty):
            continue
        bare.update(empty)
        tools.update(best.tools)
        difficulties[best.difficulty] += 1
        chosen.append(best)
    return chosen
