"""Rows of a scenario file before they are scenarios, and the values that may stand in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from offbook.base.errors import ConfigError
from offbook.base.types import Json
from offbook.base.user_values import json_value

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
        return FileRow(place, {name: json_value(value, f"{word} {name!r}", _text) for name, value in named.items()})
    except RecursionError:
        return FileRow(place, fault="nested too deeply")
    except ConfigError as error:
        return FileRow(place, fault=str(error))


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: half a character (a lone surrogate, {text[error.start]!r})") from error
    return text
