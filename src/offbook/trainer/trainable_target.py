"""What the commands `train` and `eval` can run: an object with `train` and `evaluate`, named as `module:name`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Unpack, runtime_checkable

from offbook.base.errors import ConfigError
from offbook.base.module_objects import load_object
from offbook.client.model import TrainableModel

from .evaluate import Evaluation
from .options import TrainerOptions
from .report import TrainReport


class TargetOptions(TrainerOptions, total=False):
    """Options of a Trainer, and the model for a target that was wrapped without one."""

    model: TrainableModel


@runtime_checkable
class TrainableTarget(Protocol):
    """The interface that the commands `train` and `eval` need; the objects that `trainable` returns have it."""

    def train(self, scenarios: Sequence[object], *, steps: int = 50, **options: Unpack[TargetOptions]) -> TrainReport:
        """See `Trainer.train`."""
        ...

    def evaluate(
        self,
        scenarios: Sequence[object],
        *,
        temperature: float | None = 0.0,
        rollouts: int = 1,
        **options: Unpack[TargetOptions],
    ) -> Evaluation:
        """See `Trainer.evaluate`."""
        ...


def load_target(text: str, folder: Path | None = None) -> TrainableTarget:
    """The object `module:name`; see `load_object`. Raises ConfigError, also for an object that cannot be trained."""
    target = load_object(text, folder)
    if isinstance(target, type) or not isinstance(target, TrainableTarget):
        kind = f"the class {target.__name__}" if isinstance(target, type) else f"of type {type(target).__name__}"
        raise ConfigError(
            f"target: {text} is {kind}, which has no train() and evaluate(); wrap a function or graph by "
            "offbook_langgraph.trainable(...), and name the result"
        )
    return target
