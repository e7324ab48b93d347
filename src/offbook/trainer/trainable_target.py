"""What the commands `train` and `eval` can run: an object with `train` and `evaluate`, named as `module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from offbook.base.errors import ConfigError, MissingExtraError, OffbookError

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


def load_object(text: str, folder: Path | None = None) -> object:
    """Import the object `module:name`. `folder` (default: the current one) is added to sys.path. Raises ConfigError
    that names the wrong part. Errors of the module itself keep their traceback."""
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"target: {text!r} is not of the form module:name, such as my_app:agent")
    if module_name.endswith(".py") or "/" in module_name:
        plain = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise ConfigError(f"target: {module_name!r} is a file; name its module, {plain}:{path}")
    root = str(folder or Path.cwd())
    if root not in sys.path:
        sys.path.insert(0, root)
    target = _imported(module_name, root)
    for name in path.split("."):
        if not hasattr(target, name):
            public = [attribute for attribute in dir(target) if not attribute.startswith("_")]
            raise ConfigError(
                f"target: {module_name} has no {path!r}; it has {', '.join(public[:12]) or 'no public names'}"
            )
        target = getattr(target, name)
    return target


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
    except OffbookError as error:  # the CLI would print only its message, without the line in the module
        raise RuntimeError(f"{module_name} could not be imported: {type(error).__name__}: {error}") from error
