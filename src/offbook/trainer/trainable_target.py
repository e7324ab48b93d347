"""What the commands `train` and `eval` can run: an object with `train` and `evaluate`, named as `module:name`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from offbook.base.errors import ConfigError
from offbook.base.module_objects import load_object

from .evaluate import Evaluation
from .report import TrainReport


@runtime_checkable
class TrainableTarget(Protocol):
    """The interface that the commands `train` and `eval` need; the objects that `trainable` returns have it."""

    def train(self, scenarios: Sequence[object], **options: Any) -> TrainReport:
        """See `Trainer.train`; the options are those of `TrainOptions`."""
        ...

    def evaluate(self, scenarios: Sequence[object], **options: Any) -> Evaluation:
        """See `Trainer.evaluate`; the options are those of `EvaluateOptions`."""
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
