"""The Trainer for MCP scenarios: easier scenarios first, a state that is stored with the model so that a later run resumes, and
success on held-out scenarios before and after."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from offbook import TrainableModel, Trainer, TrajectoryGroup
from offbook.base.text import one_line
from offbook_mcp.scenarios.scenario import McpScenario
from offbook_mcp.training.scenario_rollouts import McpRollout

SOLVED = 0.9
"""Success before training that leaves little to learn."""
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


_BY_TOOL = "success."


class Measured(BaseModel):
    """Means over held-out scenarios at one step: `success`, `success.TOOL`, and the parts of the reward. `scored`: number of
    scenarios with a score; None: kept by a version that did not count them."""

    model_config = ConfigDict(frozen=True)

    step: int
    rates: dict[str, float]
    scored: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Measurements before and after training. `scenarios` is the scenario file's hash, `held_out` the number measured."""

    scenarios: str
    held_out: int
    before: Measured | None = None
    after: Measured | None = None

    def lines(self) -> Iterator[str]:
        """The table as lines, or one line if nothing was measured."""
        if self.before is None or self.after is None:
            yield "success was not measured: no scenario is held out"
            return
        if "success" not in self.after.rates:
            yield "success was not measured: a judge scores the held-out scenarios. Compare steps with `offbook mcp"
            yield "compare TARGET --with step:0 --with step:newest --judge MODEL`"
            return
        yield f"success on {self.held_out} held-out scenarios (greedy), scenarios {self.scenarios[:16]}"
        names = [name for name in self.after.rates if name.startswith(_BY_TOOL)]
        rows = [("all", "success"), *((one_line(name.removeprefix(_BY_TOOL), 64), name) for name in names)]
        width = max(len(label) for label, _ in rows)
        yield f"{'':{width}}  {f'step {self.before.step}':>9}  {f'step {self.after.step}':>9}"
        for label, name in rows:
            yield f"{label:{width}}  {_percent(self.before.rates.get(name)):>9}  {_percent(self.after.rates.get(name)):>9}"
        counts = [self.held_out if one.scored is None else one.scored for one in (self.before, self.after)]
        if min(counts) < self.held_out:
            yield (
                f"Rollouts failed, so step {self.before.step} was scored on {counts[0]} of the {self.held_out} scenarios and step "
                f"{self.after.step} on {counts[1]}: the columns do not compare the same ones."
            )
        if self.before.rates.get("success", 0.0) >= SOLVED:
            yield "The model solved most of these before training: harder ones leave more to learn (--scenarios FILE)."


def tool_lines(metrics: Mapping[str, float]) -> Iterator[str]:
    """The success per tool as lines, from the metrics of an evaluation."""
    names = sorted(name for name in metrics if name.startswith(_BY_TOOL))
    labels = [one_line(name.removeprefix(_BY_TOOL), 64) for name in names]
    width = max((len(label) for label in labels), default=0)
    for label, name in zip(labels, names, strict=True):
        yield f"  {label:{width}}  {_percent(metrics[name]):>4}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"


KEY = "mcp"
"""Key in the model's state."""


class TrainingState(BaseModel):
    """The stored state. `scenarios` is the hash of the scenarios that it belongs to."""

    scenarios: str
    curriculum: CurriculumState | None = None
    before: Measured | None = None
    after: Measured | None = None

    @classmethod
    async def of(cls, model: TrainableModel, scenarios: str) -> TrainingState:
        """Read the state stored with the model; a new one if there is none, or it belongs to other scenarios."""
        kept = (await model.read_state()).get(KEY)
        try:
            state = cls.model_validate(kept)
        except ValidationError:  # no state, or one of another version: the curriculum starts over
            return cls(scenarios=scenarios)
        return state if state.scenarios == scenarios else cls(scenarios=scenarios)

    async def keep(self, model: TrainableModel) -> None:
        """Store this state with the model."""
        await model.merge_state({KEY: self.model_dump(mode="json")})


class ScenarioTrainer(Trainer):
    """A Trainer for MCP scenarios. `curriculum` is None if all scenarios are open from the start."""

    def __init__(
        self,
        model: TrainableModel,
        rollout: McpRollout,
        scenarios: Sequence[McpScenario],
        state: TrainingState,
        *,
        follow_curriculum: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, rollout, scenarios, **options)
        self.state = state
        self.curriculum: Curriculum | None = None
        if follow_curriculum:
            self.curriculum = Curriculum.start(scenarios, self.options.scenarios_per_step, state.curriculum)
        self._number = 0
        self._kept = state.model_copy()

    async def next_scenarios(self, scenarios: Sequence[object], number: int) -> list[object]:
        """Choose scenarios of the open difficulties. Stores the last iteration's state with the model."""
        self._number = number
        await self.keep_state()
        if self.curriculum is None:
            return await super().next_scenarios(scenarios, number)
        chosen = self.curriculum.open(cast(Sequence[McpScenario], scenarios))
        return await super().next_scenarios(chosen, number - self.curriculum.state.opened_at)

    def examine_rollouts(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Update the curriculum. Returns a line of text when a harder difficulty opens."""
        if self.curriculum is None:
            return None
        before = self.curriculum.state
        self.curriculum = self.curriculum.after(successes(groups), self._number)
        now = self.curriculum.state
        if now.level == before.level:
            return None
        rate = now.success.get(before.level)
        known = "" if rate is None else f" (success at {before.level}: {rate:.0%})"
        return f"difficulty {now.level} is open from the next iteration on{known}"

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Store the measurement; the first one is also the measurement before training."""
        step = next((rollout.place.step for group in groups for rollout in group if rollout.place.step is not None), 0)
        scored = sum(any(rollout.reward is not None for rollout in group) for group in groups)
        self.state.after = Measured(step=step, rates=rates(groups), scored=scored)
        if self.state.before is None:
            self.state.before = self.state.after

    async def keep_state(self) -> None:
        """Store curriculum and measurements with the model if they have changed."""
        if self.curriculum is not None:
            self.state.curriculum = self.curriculum.state
        if self.state != self._kept:
            await self.state.keep(self.model)
            self._kept = self.state.model_copy()


def successes(groups: Sequence[TrajectoryGroup]) -> dict[int, list[float]]:
    """The success of every scored rollout, by difficulty."""
    results: defaultdict[int, list[float]] = defaultdict(list)
    for group in groups:
        for rollout in group:
            if rollout.reward is not None and "success" in rollout.metrics:
                results[int(rollout.metadata["difficulty"])].append(float(rollout.metrics["success"]))
    return dict(results)


def rates(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The mean of every metric over scenarios, of the means over a scenario's scored rollouts; as in an Evaluation."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        scored = [rollout for rollout in group if rollout.reward is not None]
        for name in {name for rollout in scored for name in rollout.metrics}:
            own = [float(rollout.metrics[name]) for rollout in scored if name in rollout.metrics]
            values[name].append(math.fsum(own) / len(own))
        if scored:
            values["reward"].append(math.fsum(float(rollout.reward or 0.0) for rollout in scored) / len(scored))
    return {name: math.fsum(own) / len(own) for name, own in sorted(values.items())}
