"""Resolves sinks by name: ours and those of others are entry points of the group `offbook.sinks`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

from offbook import plugins
from offbook.base.errors import ConfigError
from offbook.contracts import EVENT_KINDS, TraceSink

from .jsonl import JsonlSink

GROUP: Final = "offbook.sinks"
"""Name -> what builds the sink from the tool's own environment variables; ours are in pyproject.toml."""
JSONL: Final = "jsonl:"
"""Prefix of the JSON Lines sink: `jsonl:FOLDER`."""
METHODS: Final = (*(kind.method for kind in EVENT_KINDS), "closed")


def sink_names() -> list[str]:
    """The names that `sinks=` and `--trace` accept, sorted."""
    return sorted([f"{JSONL}FOLDER", *plugins.names(GROUP)])


def named_sinks(text: str, option: str) -> list[str | TraceSink]:
    """Split a comma-separated list of sink names. Raises ConfigError for an empty list."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option}: names of sinks are needed, such as langfuse,wandb; got {text!r}")
    return [*names]


def resolve_sinks(items: Sequence[str | TraceSink]) -> list[TraceSink]:
    """Resolve names to sinks, and check sink objects.

    Raises ConfigError for an unknown name, a missing variable or an object that is not a sink, MissingExtraError for a
    package that is not installed.
    """
    if isinstance(items, str):
        raise ConfigError(f"sinks: a list of names and sinks is needed, got {items!r}")
    return [_named(item) if isinstance(item, str) else _checked(item, f"sinks: {item!r:.200}") for item in items]


def _named(name: str) -> TraceSink:
    if name.startswith(JSONL):
        try:
            return JsonlSink(name.removeprefix(JSONL))
        except OSError as error:
            raise ConfigError(f"sinks: the folder of {name!r} cannot be created: {error.strerror or error}") from error
    if name in plugins.names(GROUP):
        factory = plugins.load(GROUP, name)
    else:
        raise ConfigError(f"sinks: unknown sink {name!r}; available are {', '.join(sink_names())}")
    if not callable(factory):
        raise ConfigError(
            f"sinks: {name!r} is of type {type(factory).__name__}; a callable without arguments is needed"
        )
    return _checked(cast(Callable[[], object], factory)(), f"sinks: {name!r}")


def _checked(sink: object, where: str) -> TraceSink:
    missing = [method for method in METHODS if not callable(getattr(sink, method, None))]
    if missing or isinstance(sink, type):
        what = "a class: pass an instance" if isinstance(sink, type) else f"no trace sink: it has no {missing[0]}()"
        raise ConfigError(f"{where} is {what}. Subclass offbook.TraceSink")
    return cast(TraceSink, sink)
