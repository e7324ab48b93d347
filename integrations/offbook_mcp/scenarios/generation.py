"""The state of one generation: the valid scenarios, and the rejected candidates by reason."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from offbook.base.text import counted, one_line
from offbook_mcp.connection.pool import ServerPool

from .execution import Executor, ReferenceRun
from .explore import Exploration
from .scenario import (
    CheckKind,
    McpScenario,
    ReferenceCall,
    ScenarioSet,
    combination,
    combinations,
    normalised,
    number_held_out,
    split_scenarios,
    without_joints,
)
from .wording import is_short

_SHARES = {1: 0.32, 2: 0.3, 3: 0.16, 4: 0.15, 5: 0.07}
"""Target shares of the difficulties."""
_MAX_WITHOUT_ARGUMENTS = 3


def select(scenarios: Sequence[McpScenario], count: int, rng: random.Random) -> list[McpScenario]:
    """Select up to `count` scenarios: first of tools that have none yet, then spread over tools and difficulties.

    At most _MAX_WITHOUT_ARGUMENTS share a call without arguments, since they all end up in the same split.
    """
    waiting = list(scenarios)
    rng.shuffle(waiting)
    tools: Counter[str] = Counter()
    difficulties: Counter[int] = Counter()
    bare: Counter[str] = Counter()
    chosen: list[McpScenario] = []

    def cost(scenario: McpScenario) -> tuple[bool, float]:
        rarest = min((tools[tool] for tool in scenario.tools), default=0)
        busiest = max((tools[tool] for tool in scenario.tools), default=0)
        common = difficulties[scenario.difficulty] / (len(_SHARES) * _SHARES[scenario.difficulty])
        return rarest > 0, rarest + 0.3 * busiest + common

    while waiting and len(chosen) < count:
        best = min(waiting, key=cost)
        waiting.remove(best)
        empty = [key for key in combinations(best) if key.endswith(", {}]")]
        if any(bare[key] >= _MAX_WITHOUT_ARGUMENTS for key in empty):
            continue
        bare.update(empty)
        tools.update(best.tools)
        difficulties[best.difficulty] += 1
        chosen.append(best)
    return chosen


Progress = Callable[[str], None]


@dataclass
class ScenarioGeneration:
    """The state of one `generate_scenarios` call."""

    pool: ServerPool
    exploration: Exploration
    count: int
    seed: int
    max_difficulty: int
    progress: Progress
    valid: list[McpScenario] = field(default_factory=list[McpScenario])
    dropped: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """By reason of `dropped`: what a tool answered, on one line."""
    _known: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.executor = Executor(self.pool, self.exploration)

    def is_new(self, calls: Sequence[ReferenceCall]) -> bool:
        """Whether no earlier candidate has the same calls in any order. Registers these calls."""
        return self._first_time("\n".join(sorted(combination(call) for call in calls)), "the same calls as another")

    def drop(self, run: ReferenceRun) -> bool:
        """Whether a run has a fault. Counts it as dropped, with its first example."""
        if run.fault:
            self.dropped[run.fault] += 1
            if run.example:
                self.examples.setdefault(run.fault, one_line(run.example, 120))
        return bool(run.fault)

    def keep(
        self,
        task: str,
        calls: tuple[ReferenceCall, ...],
        answer: tuple[str, ...],
        *,
        difficulty: int,
        source: Literal["schemas", "llm"],
        recipe: str,
    ) -> bool:
        """Add a scenario whose calls ran twice. Returns False, and counts it as dropped, if the task is too long or known."""
        if not is_short(task):
            self.dropped["the task was too long"] += 1
            return False
        if not self._first_time(json.dumps(normalised(task)), "the same task as another"):
            return False
        self.valid.append(
            McpScenario(
                id=f"s{len(self.valid) + 1:04}",
                task=task,
                difficulty=difficulty,
                tools=tuple(dict.fromkeys(call.tool for call in calls)),
                check=CheckKind.ANSWER if answer else CheckKind.CALLS,
                calls=calls,
                answer=answer,
                source=source,
                recipe=recipe,
                server=self.pool.fingerprint,
            )
        )
        return True

    def report_progress(self) -> None:
        """Report the progress."""
        self.progress(
            f"{counted(len(self.valid), 'valid scenario')}, {counted(sum(self.dropped.values()), 'candidate')} dropped"
        )

    def result(self, held_out: float) -> ScenarioSet:
        """Split the valid scenarios, select `count` of them, and number them."""
        separable = without_joints(self.valid, held_out)
        split = split_scenarios(separable, held_out=held_out, seed=self.seed)
        evaluation = [scenario for scenario in split if scenario.split == "eval"]
        chosen = select(evaluation, number_held_out(self.count, held_out), self.rng)
        chosen += select([s for s in split if s.split == "train"], self.count - len(chosen), self.rng)
        self.rng.shuffle(chosen)
        if joints := len(self.valid) - len(separable):
            self.dropped["its calls belong to both parts, training and held out"] += joints
        if spare := len(separable) - len(chosen):
            self.dropped["more than were asked for"] += spare
        numbered = tuple(scenario.model_copy(update={"id": f"s{n:04}"}) for n, scenario in enumerate(chosen, 1))
        return ScenarioSet(numbered, self.pool.fingerprint, dict(self.dropped), self.examples)

    def _first_time(self, key: str, otherwise: str) -> bool:
        if key in self._known:
            self.dropped[otherwise] += 1
            return False
        self._known.add(key)
        return True
