"""Objects that a command line names: `my_app:agent` is the object `agent` of the module `my_app`, which may be in the
current folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from .errors import ConfigError, MissingExtraError, OffbookError


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
