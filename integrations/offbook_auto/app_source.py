"""A wrapped app with its scenarios, as a TrainingSource."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from offbook.base.errors import ConfigError
from offbook.client.model import TrainableModel
from offbook.contracts import Judge
from offbook.trainer.report import TrainReport
from offbook_compare.candidates import CandidateLike
from offbook_compare.comparison import acompare
from offbook_compare.results import ComparisonReport
from offbook_compare.targets import ComparableTarget, bound_to

from .improve import Split, TrainingSource

HELD_OUT = 0.25
"""Share of the scenarios that is held out where none are given."""
COMPARED = ("concurrency", "timeout", "max_completion_tokens")
"""Options of a training that its comparisons share."""


@runtime_checkable
class WrappedApp(ComparableTarget, Protocol):
    """What `trainable` returns."""

    async def atrain(self, scenarios: Sequence[object], **options: Any) -> TrainReport:
        """See `Trainer.atrain`; the options are those of `TrainOptions`."""
        ...


@dataclass(frozen=True)
class AppWithScenarios(TrainingSource):
    """A wrapped app. `held_out`: () holds out a quarter of `scenarios`. `options`: those of its training.

    Raises ConfigError for an app without a model, or with several, and for too few scenarios."""

    app: WrappedApp
    scenarios: Sequence[object]
    held_out: Sequence[object] = ()
    own_model: TrainableModel | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not isinstance(self.app, WrappedApp):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(
                f"target: what offbook_langgraph.trainable(...) returned is needed, got {self.app!r:.200}"
            )
        models = self.app.own_models()
        if self.own_model is None and len(models) != 1:
            named = "several models" if models else "no model"
            raise ConfigError(
                f"target: the app was wrapped with {named}; one is improved: pass trainable(model=...), or --model and "
                "--base-model for an app without one"
            )
        if len(self.scenarios) < (2 if self.held_out else 4):
            raise ConfigError(f"scenarios: too few to train on and to hold out, got {len(self.scenarios)}")
        if not self.held_out:
            order = list(self.scenarios)
            random.Random("held out").shuffle(order)
            share = max(2, round(HELD_OUT * len(order)))
            object.__setattr__(self, "held_out", order[:share])
            object.__setattr__(self, "scenarios", order[share:])

    @property
    def model(self) -> TrainableModel:
        """The model that is trained."""
        return self.own_model or self.app.own_models()[0]

    @property
    def judge(self) -> Judge | None:
        """The judge of the options, else the app's own."""
        return self.options.get("judge") or self.app.own_judge()

    def sizes(self) -> tuple[int, int]:
        """How many scenarios there are to train on, and held out."""
        return len(self.scenarios), len(self.held_out)

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """Compare on the scenarios of a split."""
        app = self.app if self.own_model is None else bound_to(self.app, self.own_model)
        shared = {name: self.options[name] for name in COMPARED if name in self.options}
        if len(candidates) > 1 and self.judge is not None:
            shared["judge"] = self.judge
        if split == "held-out":
            shared["trained_on"] = self.scenarios
        chosen = self.scenarios if split == "train" else self.held_out
        return await acompare(app, chosen, candidates, **shared, **options)

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total."""
        own = {} if self.own_model is None else {"model": self.own_model}
        return await self.app.atrain(self.scenarios, steps=steps, **self.options, **own)
