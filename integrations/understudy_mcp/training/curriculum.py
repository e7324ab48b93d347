"""Easier scenarios first, harder ones as success rises: a pure function of what rollouts achieved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict

from ..scenarios.scenario import McpScenario

RISES_AT = 0.6
"""Mean success at the hardest open difficulty from which the next one opens."""
LONGEST = 8
"""Iterations after which the next difficulty opens in any case: rollouts that all fail alike teach nothing."""
_MEMORY = 0.5
"""What the running mean keeps of its past at each iteration."""


class CurriculumState(BaseModel):
    """What is kept with the model. level: the hardest open difficulty; opened_at: the iteration that opened it; success: the
    running mean at each difficulty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int
    opened_at: int = 0
    success: dict[int, float] = {}


@dataclass(frozen=True)
class Curriculum:
    """Difficulties that there are, in order, and how far the model is."""

    difficulties: tuple[int, ...]
    state: CurriculumState = field(hash=False)

    @classmethod
    def start(cls, scenarios: Sequence[McpScenario], least: int, state: CurriculumState | None = None) -> Curriculum:
        """From a kept state, or from the lowest difficulty at which at least `least` scenarios are open."""
        difficulties = tuple(sorted({each.difficulty for each in scenarios}))
        if state is not None:
            return cls(difficulties, state)
        enough = (level for level in difficulties if sum(each.difficulty <= level for each in scenarios) >= least)
        return cls(difficulties, CurriculumState(level=next(enough, difficulties[-1])))

    def open(self, scenarios: Sequence[McpScenario]) -> list[McpScenario]:
        """The scenarios up to the level; all where there are none."""
        chosen = [each for each in scenarios if each.difficulty <= self.state.level]
        return chosen or list(scenarios)

    def after(self, results: Mapping[int, Sequence[float]], number: int) -> Curriculum:
        """What the successes of iteration `number`, by difficulty, change. At most one difficulty is opened."""
        success = dict(self.state.success)
        for difficulty, values in results.items():
            if values:
                mean = math.fsum(values) / len(values)
                success[difficulty] = _MEMORY * success.get(difficulty, mean) + (1 - _MEMORY) * mean
        state = self.state.model_copy(update={"success": success})
        harder = [each for each in self.difficulties if each > state.level]
        hardest = max((each for each in self.difficulties if each <= state.level), default=state.level)
        ready = results.get(hardest) and success[hardest] >= RISES_AT
        if harder and (ready or number + 1 - state.opened_at >= LONGEST):
            state = state.model_copy(update={"level": harder[0], "opened_at": number + 1})
        return replace(self, state=state)
