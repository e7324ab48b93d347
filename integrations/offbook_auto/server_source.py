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
from offbook_mcp.scenarios.scenario import ScenarioSet
from offbook_mcp.training.mcp_trainer import MCPTrainer, MCPTrainerOptions
from offbook_mcp.training.scenario_rollouts import ScenarioJudge, unused_judge

from .sources import COMPARED, Split, Stage, TrainingSource


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

    def scenarios(self, split: Split) -> Sequence[object]:
        """The scenarios of a split."""
        assert self.known is not None, "the stage has made them"
        return self.known.train if split == "train" else self.known.eval

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """Compare on the scenarios of a split. The judge of the options compares what has rewards too."""
        own = self.trainer.options.passed_to(TrainerOptions)
        options |= {name: own[name] for name in COMPARED if name in own}
        if split == "held-out":
            options["trained_on"] = self.scenarios("train")
        async with self.trainer.rollouts() as (rollout, _):
            judge = self.trainer.options.judge if self.judge is not None else None
            target = RolloutTarget(rollout, judge=judge)
            return await acompare(target, self.scenarios(split), candidates, model=self.model, **options)

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total. Success is not measured here: comparisons do."""
        return await self.trainer.atrain_unmeasured(steps)
