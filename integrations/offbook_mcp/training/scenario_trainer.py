"""The Trainer for MCP scenarios: success on held-out scenarios before and after, kept with the model for a later run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from offbook import TrainableModel, Trainer, TrajectoryGroup
from offbook.base.text import one_line
from offbook.trainer.evaluate import summarise
from offbook_mcp.scenarios.scenario import McpScenario
from offbook_mcp.training.scenario_rollouts import McpRollout

SOLVED = 0.9
"""Success before training that leaves little to learn."""
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
            yield "success was not measured: a judge scores the held-out scenarios. Compare steps with `offbook compare"
            yield "mcp:TARGET --with step:0 --with step:newest --judge MODEL`"
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
    before: Measured | None = None
    after: Measured | None = None

    @classmethod
    async def of(cls, model: TrainableModel, scenarios: str) -> TrainingState:
        """Read the state stored with the model; a new one if there is none, or it belongs to other scenarios."""
        kept = (await model.read_state()).get(KEY)
        try:
            state = cls.model_validate(kept)
        except ValidationError:  # no state, or one of another version
            return cls(scenarios=scenarios)
        return state if state.scenarios == scenarios else cls(scenarios=scenarios)

    async def keep(self, model: TrainableModel) -> None:
        """Store this state with the model."""
        await model.merge_state({KEY: self.model_dump(mode="json")})


class ScenarioTrainer(Trainer):
    """A Trainer for MCP scenarios. `state` has what its evaluations measured."""

    def __init__(
        self,
        model: TrainableModel,
        rollout: McpRollout,
        scenarios: Sequence[McpScenario],
        state: TrainingState,
        **options: Any,
    ) -> None:
        super().__init__(model, rollout, scenarios, **options)
        self.state = state
        self._kept = state.model_copy()

    async def next_scenarios(self, scenarios: Sequence[object], number: int) -> list[object]:
        """Stores the measurement before training, so that a run that is cut off does not repeat it."""
        await self.keep_state()
        return await super().next_scenarios(scenarios, number)

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Note the measurement; the first one is also the measurement before training."""
        step = next((rollout.place.step for group in groups for rollout in group if rollout.place.step is not None), 0)
        measured = summarise(groups, {self.model.name: step}, 0.0)
        self.state.after = Measured(step=step, rates=measured.metrics, scored=measured.scored)
        if self.state.before is None:
            self.state.before = self.state.after

    async def keep_state(self) -> None:
        """Store the measurements with the model if they have changed."""
        if self.state != self._kept:
            await self.state.keep(self.model)
            self._kept = self.state.model_copy()
