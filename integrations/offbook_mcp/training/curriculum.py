"""The curriculum: easier scenarios first, harder ones as the success rate rises. Pure functions of rollout results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict

from offbook_mcp.scenarios.scenario import McpScenario

RISES_AT = 0.6
"""Mean success at the hardest open difficulty that opens the next one."""
LONGEST = 8
"""Iterations after which the next difficulty opens in any case: groups without spread train nothing."""
_MEMORY = 0.5
"""Weight of the past in the running mean, per iteration."""


class CurriculumState(BaseModel):
    """The curriculum's state, stored with the model.

    level: the hardest open difficulty. opened_at: the iteration that opened it. success: the running mean by difficulty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int
    opened_at: int = 0
    success: dict[int, float] = {}


@dataclass(frozen=True)
class Curriculum:
    """The existing difficulties in order, and the current state."""

    difficulties: tuple[int, ...]
    state: CurriculumState = field(hash=False)

    @classmethod
    def start(cls, scenarios: Sequence[McpScenario], least: int, state: CurriculumState | None = None) -> Curriculum:
        """Resume from a stored state, or begin at the lowest difficulty that opens at least `least` scenarios."""
        difficulties = tuple(sorted({scenario.difficulty for scenario in scenarios}))
        if state is not None:
            return cls(difficulties, state)
        enough = (
            level for level in difficulties if sum(scenario.difficulty <= level for scenario in scenarios) >= least
        )
        return cls(difficulties, CurriculumState(level=next(enough, difficulties[-1])))

    def open(self, scenarios: Sequence[McpScenario]) -> list[McpScenario]:
        """The scenarios up to the current level; all if there are none."""
        chosen = [scenario for scenario in scenarios if scenario.difficulty <= self.state.level]
        return chosen or list(scenarios)

    def after(self, results: Mapping[int, Sequence[float]], number: int) -> Curriculum:
        """The curriculum after iteration `number` with these successes by difficulty. Opens at most one difficulty."""
        success = dict(self.state.success)
        for difficulty, values in results.items():
            if values:
                mean = math.fsum(values) / len(values)
                success[difficulty] = _MEMORY * success.get(difficulty, mean) + (1 - _MEMORY) * mean
        state = self.state.model_copy(update={"success": success})
        harder = [level for level in self.difficulties if level > state.level]
        hardest = max((level for level in self.difficulties if level <= state.level), default=state.level)
        ready = results.get(hardest) and success[hardest] >= RISES_AT
        if harder and (ready or number + 1 - state.opened_at >= LONGEST):
            state = state.model_copy(update={"level": harder[0], "opened_at": number + 1})
        return replace(self, state=state)
