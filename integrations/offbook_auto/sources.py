"""Where the scenarios of a training come from, and what runs on them: `TrainingSource`, and the one of a wrapped app."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from offbook.base.errors import ConfigError
from offbook.client.model import TrainableModel
from offbook.contracts import Judge
from offbook.trainer.report import TrainReport
from offbook_compare.candidates import CandidateLike
from offbook_compare.comparison import acompare
from offbook_compare.results import ComparisonReport
from offbook_compare.targets import ComparableTarget

Split = Literal["train", "held-out"]
Stage = tuple[str, Callable[[], Awaitable[None]]]

HELD_OUT = 0.25
"""Share of the scenarios that is held out where none are given."""
COMPARED = ("concurrency", "timeout", "max_completion_tokens")
"""Options of a training that its comparisons share."""


class TrainingSource(Protocol):
    """Where scenarios come from, and what runs on them so that any model can answer."""

    @property
    def model(self) -> TrainableModel:
        """The model that is trained."""
        ...

    @property
    def judge(self) -> Judge | None:
        """What scores runs that have no reward; None: each run has one."""
        ...

    def input_stages(self) -> Sequence[Stage]:
        """What makes the scenarios. Empty where they are there."""
        return ()

    def texts(self) -> Mapping[str, str]:
        """Texts for the report, such as the prompt."""
        return {}

    def scenarios(self, split: Split) -> Sequence[object]:
        """The scenarios of a split, which the stages have made."""
        ...

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """`offbook_compare.acompare` on the scenarios of a split."""
        ...

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total."""
        ...


@runtime_checkable
class WrappedApp(ComparableTarget, Protocol):
    """What `trainable` returns."""

    async def atrain(self, scenarios: Sequence[object], **options: Any) -> TrainReport:
        """See `Trainer.atrain`; the options are those of `TrainOptions`."""
        ...


@dataclass
class AppWithScenarios(TrainingSource):
    """A wrapped app. `held_out`: () holds out a quarter of `train`. `options`: those of its training.

    Raises ConfigError for an app without a model, or with several, and for too few scenarios."""

    app: WrappedApp
    train: Sequence[object]
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
        if len(self.train) < (2 if self.held_out else 4):
            raise ConfigError(f"scenarios: too few to train on and to hold out, got {len(self.train)}")
        if not self.held_out:
            order = list(self.train)
            random.Random("held out").shuffle(order)
            share = max(2, round(HELD_OUT * len(order)))
            self.held_out, self.train = order[:share], order[share:]

    @property
    def model(self) -> TrainableModel:
        """The model that is trained."""
        return self.own_model or self.app.own_models()[0]

    @property
    def judge(self) -> Judge | None:
        """The judge of the options, else the app's own."""
        return self.options.get("judge") or self.app.own_judge()

    def scenarios(self, split: Split) -> Sequence[object]:
        """The scenarios of a split."""
        return self.train if split == "train" else self.held_out

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """Compare on the scenarios of a split."""
        options |= {name: self.options[name] for name in COMPARED if name in self.options}
        if len(candidates) > 1 and self.judge is not None:
            options["judge"] = self.judge
        if split == "held-out":
            options["trained_on"] = self.train
        return await acompare(self.app, self.scenarios(split), candidates, model=self.own_model, **options)

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total."""
        own = {} if self.own_model is None else {"model": self.own_model}
        return await self.app.atrain(self.train, steps=steps, **self.options, **own)
