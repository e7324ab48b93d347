"""Command-line targets: `my_app:agent` is the object `agent` of the module `my_app`, looked for in the current folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Unpack, runtime_checkable

from ..errors import ConfigError
from .evaluate import Evaluation
from .report import TrainReport
from .trainer import TrainerOptions


@runtime_checkable
class TrainableTarget(Protocol):
    """What the commands `train` and `eval` need of a target; everything `trainable` returns has it."""

    def train(
        self, scenarios: Sequence[object], *, steps: int = 50, **options: Unpack[TrainerOptions]
    ) -> TrainReport: ...

    def evaluate(
        self,
        scenarios: Sequence[object],
        *,
        temperature: float | None = 0.0,
        rollouts: int = 1,
        **options: Unpack[TrainerOptions],
    ) -> Evaluation: ...


def load_target(text: str, folder: Path | None = None) -> TrainableTarget:
    """The object that `module:name` names. Raises ConfigError that says which part is wrong."""
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"target: {text!r} is not of the form module:name, such as my_app:agent")
    root = str(folder or Path.cwd())
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"target: there is no module {module_name!r} in {root} or among installed packages"
            ) from error
        raise
    for name in path.split("."):
        if not hasattr(found, name):
            public = [each for each in vars(found) if not each.startswith("_")]
            raise ConfigError(
                f"target: {module_name} has no {path!r}; it has {', '.join(public[:12]) or 'no public names'}"
            )
        found = getattr(found, name)
    if not isinstance(found, TrainableTarget):
        raise ConfigError(
            f"target: {text} is {type(found).__name__}, which has no train(); wrap it: "
            "from understudy_langgraph import trainable"
        )
    return found
