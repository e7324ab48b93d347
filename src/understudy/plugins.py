"""Plugins found by entry point and loaded only when asked for by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from .errors import ConfigError

PluginGroup = Literal["understudy.sinks", "understudy.commands"]


def names(group: PluginGroup) -> list[str]:
    """What is installed, sorted; nothing is loaded."""
    return sorted({point.name for point in entry_points(group=group)})


def load(group: PluginGroup, name: str) -> object:
    """The object behind one entry point. Raises ConfigError: unknown (lists what there is), doubled, or broken."""
    found: list[EntryPoint] = [point for point in entry_points(group=group) if point.name == name]
    if not found:
        raise ConfigError(f"no plugin {name!r} in {group!r}: installed are {names(group) or 'none'}")
    if len({point.value for point in found}) > 1:
        raise ConfigError(f"plugin {name!r} in {group!r} is offered twice: {sorted(point.value for point in found)}")
    try:
        return found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"plugin {name!r} ({found[0].value}) cannot be loaded: {error}") from error
