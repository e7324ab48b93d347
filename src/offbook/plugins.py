"""Plugins: objects that other packages offer as entry points. They are loaded only by name. And modules of our own that need an extra."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from .base.errors import ConfigError, MissingExtraError

Base = TypeVar("Base")
_DOCSTRING = r'r?"""(.*?)(?:"""|\n)'
"""Its first line. Parsing the modules of all commands would take half of the time of `offbook --help`."""


@cache
def _installed(places: tuple[str, ...]) -> dict[str, EntryPoints]:
    """Our entry points by group. Reading them takes tens of milliseconds; `places`, `sys.path`, is where they come from."""
    del places
    installed = entry_points()
    return {group: installed.select(group=group) for group in installed.groups if group.startswith("offbook.")}


def _points(group: str) -> EntryPoints:
    return _installed(tuple(sys.path)).get(group, EntryPoints())


def names(group: str) -> list[str]:
    """The names of the installed plugins, sorted. Nothing is loaded."""
    return sorted({point.name for point in _points(group)})


def summary(group: str, name: str) -> str | None:
    """The first line of the docstring of an entry point, as `docstring_line`."""
    point = next(point for point in _points(group) if point.name == name)
    return docstring_line(point.module, point.attr)


def docstring_line(module: str, attribute: str) -> str | None:
    """The first line of the docstring of a module's function or class, else of the module, read without importing it.
    None if there is none."""
    package, *parts = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*parts)
    files = [path.with_suffix(".py"), path / "__init__.py"] if parts else [Path(spec.origin)]
    for file in filter(Path.is_file, files):
        source = file.read_text("utf-8")
        text = re.search(rf"^(?:def|class) {attribute}\b.*\n(?:(?:[ )].*)?\n)*?    {_DOCSTRING}", source, re.MULTILINE)
        text = text or re.match(rf"(?:#.*\n|\s)*{_DOCSTRING}", source)
        return text[1] if text else None
    return None


def load(group: str, name: str) -> object:
    """The object behind one entry point. Raises ConfigError for a name that is unknown, ambiguous, or cannot be
    loaded, MissingExtraError with the command that installs what it needs."""
    points = [point for point in _points(group) if point.name == name]
    if not points:
        raise ConfigError(f"no plugin {name!r} in {group!r}; installed: {', '.join(names(group)) or 'none'}")
    if len({point.value for point in points}) > 1:
        raise ConfigError(
            f"plugin {name!r} in {group!r} is defined twice: {sorted(point.value for point in points)}; uninstall one of them"
        )
    try:
        return points[0].load()
    except MissingExtraError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"plugin {name!r} ({points[0].value}) cannot be loaded: {error}: reinstall its package, or remove it"
        ) from error


def load_class(group: str, name: str, base: type[Base]) -> type[Base]:
    """The class behind one entry point. Raises ConfigError also for anything but a subclass of `base`."""
    loaded = load(group, name)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(f"plugin {name!r} in {group!r} is no subclass of {base.__name__}: fix its entry point")
    return loaded


def imported(module: str, extra: str) -> Any:
    """Import a module. Raises MissingExtraError for a package of `extra` that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "offbook":
            raise
        raise MissingExtraError(error.name, extra) from error
