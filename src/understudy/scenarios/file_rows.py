"""Rows of a scenario file before they are scenarios, and the values that may stand in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import TypeAlias, cast

from understudy.errors import ConfigError
from understudy.types import Json

Place: TypeAlias = int
"""The line where a row begins (from 1), or its index in a dataset (from 0)."""


@dataclass(frozen=True)
class FileRow:
    """What was found at one place: the row's values by name, or its fault."""

    place: Place
    values: dict[str, Json] | None = None
    fault: str = ""


def row_of(place: Place, found: object, word: str) -> FileRow:
    """A row whose values are JSON, each named as `word` ("key", "column") in a fault."""
    if not isinstance(found, Mapping):
        return FileRow(place, fault=f"an object is needed, got {type(found).__name__}")
    named = cast(Mapping[str, object], found)
    try:
        return FileRow(place, {name: json_value(value, f"{word} {name!r}") for name, value in named.items()})
    except RecursionError:
        return FileRow(place, fault="nested too deeply")
    except ConfigError as error:
        return FileRow(place, fault=str(error))


def json_value(value: object, where: str) -> Json:
    """The value as JSON, dates and times as ISO text. Raises ConfigError that begins with `where`, and with the place
    inside, for what JSON has no word for: NaN, infinity, bytes, images, other objects."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: JSON has no {value!r}; use null, or leave it out")
        return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(items)]
    if isinstance(value, Mapping):
        named = cast(Mapping[object, object], value)
        return {_text(str(name), where): json_value(item, f"{where}[{name!r}]") for name, item in named.items()}
    raise ConfigError(f"{where}: {type(value).__name__} is no JSON value; store text or numbers, or a path to the file")


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: half a character (a lone surrogate, {text[error.start]!r})") from error
    return text
