"""Collections that users pass: read once, and refused by what they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from .errors import ConfigError

Item = TypeVar("Item")


def as_list(values: Iterable[Item], option: str, item: str = "scenario") -> list[Item]:
    """The items of a collection, which may be a generator: it is read once, here.

    Raises ConfigError, which names `option`, for what can be iterated over without being a collection of `item`s, such as a
    str or a dict, and for what cannot be iterated over."""
    value: Any = values
    kind = type(cast(object, value)).__name__
    what = f"{option}: a list of {item}s is needed, got"
    if isinstance(value, str | bytes):
        raise ConfigError(f"{what} the {kind} {value!r:.80}: pass [{value!r:.40}], or read a file first")
    if hasattr(value, "iterrows"):
        raise ConfigError(f"{what} a {kind}, whose items are its columns: pass .to_dict('records')")
    if isinstance(value, Mapping | BaseModel):
        raise ConfigError(f"{what} one {kind}, {value!r:.80}: pass [{item}] for one, or a list of its values")
    if not hasattr(value, "__iter__"):
        hint = ": read it with `async for` first" if hasattr(value, "__aiter__") else ""
        raise ConfigError(f"{what} {'None' if value is None else f'{kind} {value!r:.80}'}{hint}")
    return list(values)
