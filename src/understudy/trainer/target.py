"""Command-line targets: `my_app:agent` is the object `agent` of the module `my_app`, looked for in the current folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Unpack, runtime_checkable

from ..client.model import TrainableModel
from ..errors import ConfigError, MissingExtraError, UnderstudyError
from .evaluate import Evaluation
from .options import TrainerOptions
from .report import TrainReport


class TargetOptions(TrainerOptions, total=False):
    """Options of a Trainer, and the model of a target that was wrapped without one."""

    model: TrainableModel


@runtime_checkable
class TrainableTarget(Protocol):
    """What the commands `train` and `eval` need of a target; everything `trainable` returns has it."""

    def train(
        self, scenarios: Sequence[object], *, steps: int = 50, **options: Unpack[TargetOptions]
    ) -> TrainReport: ...

    def evaluate(
        self,
        scenarios: Sequence[object],
        *,
        temperature: float | None = 0.0,
        rollouts: int = 1,
        **options: Unpack[TargetOptions],
    ) -> Evaluation: ...


def load_target(text: str, folder: Path | None = None) -> TrainableTarget:
    """The object that `module:name` names. Raises ConfigError that says which part is wrong; what the module itself raises
    keeps its traceback."""
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"target: {text!r} is not of the form module:name, such as my_app:agent")
    if module_name.endswith(".py") or "/" in module_name:
        plain = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"target: {module_name!r} is a file; name its module, {plain}:{path}")
    root = str(folder or Path.cwd())
    if root not in sys.path:
        sys.path.insert(0, root)
    found = _imported(module_name, root)
    for name in path.split("."):
        if not hasattr(found, name):
            public = [each for each in dir(found) if not each.startswith("_")]
            raise ConfigError(
                f"target: {module_name} has no {path!r}; it has {', '.join(public[:12]) or 'no public names'}"
            )
        found = getattr(found, name)
    if isinstance(found, type) or not isinstance(found, TrainableTarget):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
        raise ConfigError(
            f"target: {text} is {kind}, which has no train() and evaluate(); wrap a function or graph by "
            "understudy_langgraph.trainable(...), and name the result"
        )
    return found


def _imported(module_name: str, root: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"target: there is no module {module_name!r} in {root} or among installed packages"
            ) from error
        raise
    except MissingExtraError:
        raise
    except UnderstudyError as error:  # one line would not say where in the module
        raise RuntimeError(f"{module_name} could not be imported: {type(error).__name__}: {error}") from error
