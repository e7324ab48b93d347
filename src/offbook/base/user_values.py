"""Values that user code passes: collections read once, text that UTF-8 can encode, and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from numbers import Integral, Real
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


def plain_text(value: object) -> str:
    r"""The value as text. Lone surrogates, which UTF-8 cannot encode, become question marks.

    >>> plain_text({"city": "Os\ud800lo"}), plain_text("\udc00")
    ("{'city': 'Os\\ud800lo'}", '?')
    """
    return str(value).encode("utf-8", "replace").decode()


def json_value(value: object, where: str, text: Callable[[str, str], str] = lambda text, _: plain_text(text)) -> Any:
    """The value as JSON: dates and times as ISO text, numbers of other libraries as int and float.

    `text` converts a string at a place. Raises ConfigError that begins with `where`, and with the place inside, for what
    JSON has no word for: NaN, infinity, bytes, images, other objects.
    """
    if isinstance(value, str):
        return text(value, where)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: JSON has no {value!r}; use null, or leave it out")
        return float(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return [json_value(item, f"{where}[{index}]", text) for index, item in enumerate(items)]
    if isinstance(value, Mapping):
        named = cast(Mapping[object, object], value)
        return {text(str(name), where): json_value(item, f"{where}[{name!r}]", text) for name, item in named.items()}
    raise ConfigError(
        f"{where}: {type(value).__name__} is not a JSON value; store text or numbers, or a path to the file"
    )
