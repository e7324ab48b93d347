"""An MCP server with its scenarios, as a TrainingSource."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook.contracts import Judge
from offbook.trainer.options import TrainerOptions
from offbook.trainer.report import TrainReport
from offbook_compare.candidates import CandidateLike
from offbook_compare.comparison import acompare
from offbook_compare.results import ComparisonReport
from offbook_compare.targets import RolloutTarget
from offbook_mcp.scenarios.scenario import HELD_OUT, ScenarioSet
from offbook_mcp.training.mcp_trainer import MCPTrainer, MCPTrainerOptions
from offbook_mcp.training.scenario_rollouts import ScenarioJudge, unused_judge

from .app_source import COMPARED
from .improve import Split, Stage, TrainingSource


@dataclass(frozen=True)
class JudgedRollouts(RolloutTarget):
    """A rollout function whose rollouts a judge may score."""

    judge: Judge | None = None

    def own_judge(self) -> Judge | None:
        """The judge."""
        return self.judge


@dataclass
class ServerSource(TrainingSource):
    """A server, by a trainer. `known`: its scenarios; None: they are not made yet.

    Raises ConfigError for scenarios of which none is held out."""

    trainer: MCPTrainer
    known: ScenarioSet | None

    def __post_init__(self) -> None:
        if self.known is not None and not (self.known.train and self.known.eval):
            missing = "to train on" if not self.known.train else 'held out: give some `"split": "eval"` in their file'
            raise ConfigError(f"scenarios: none of {len(self.known.scenarios)} is {missing}")

    @property
    def model(self) -> TrainableModel:
        """The model that is trained."""
        return self.trainer.model

    @property
    def judge(self) -> Judge | None:
        """The judge as in training: it scores what cannot be executed. None: each run has a reward from execution."""
        options, scenarios = self.trainer.options, self.known.scenarios if self.known is not None else ()
        if options.judge is None or unused_judge(scenarios, options.judge):
            return None
        return ScenarioJudge(options.judge, scenarios)

    def input_stages(self) -> list[Stage]:
        """What generates the scenarios, unless they are there."""
        return [] if self.known is not None else [("scenarios", self._generate)]

    async def _generate(self) -> None:
        async with self.trainer.rollouts() as (_, scenarios):
            passed: dict[str, Any] = self.trainer.options.passed_to(MCPTrainerOptions)
            self.trainer = MCPTrainer(self.trainer.target, self.model, scenarios, **passed)
            self.known = scenarios
        self.__post_init__()

    def sizes(self) -> tuple[int, int]:
        """How many scenarios there are, or will be, to train on and held out."""
        if self.known is not None:
            return len(self.known.train), len(self.known.eval)
        held_out = round(HELD_OUT * self.trainer.options.count)
        return self.trainer.options.count - held_out, held_out

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """Compare on the scenarios of a split."""
        own = self.trainer.options.passed_to(TrainerOptions)
        shared = {name: own[name] for name in COMPARED if name in own}
        async with self.trainer.rollouts() as (rollout, scenarios):
            if split == "held-out":
                shared["trained_on"] = scenarios.train
            judge = self.trainer.options.judge if self.judge is not None else None  # compares whatever has rewards too
            target = JudgedRollouts(rollout, self.model, judge=judge)
            chosen = scenarios.train if split == "train" else scenarios.eval
            return await acompare(target, chosen, candidates, **shared, **options)

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total. Success is not measured here: comparisons do."""
        return await self.trainer.atrain_unmeasured(steps)
