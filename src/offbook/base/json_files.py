"""Text and JSON that users, models and other programs have written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from .errors import ConfigError

if TYPE_CHECKING:  # needs pydantic, which the learner's own modules do without
    from .types import Json

DEEPEST = 128
"""Limit of nested JSON. Parsers stop at about 200 levels and serialisers at 255, of a body that contains the value."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse)
"""Python's own decoder takes NaN and Infinity, which are no JSON: readers in other languages refuse them."""


def too_deep(value: Json, structures: int) -> bool:
    """Whether JSON with so many braces and brackets is nested more than DEEPEST times."""
    level: list[Json] = [value] if structures > DEEPEST else []
    for _ in range(DEEPEST + 1):
        inside = {id(child): child for item in level for child in _structures(item)}  # a value may contain itself
        level = list(inside.values())
    return bool(level)


def _structures(value: Json) -> list[Json]:
    children: Iterable[Json] = ()
    if isinstance(value, dict):
        children = cast("dict[str, Json]", value).values()
    elif isinstance(value, list | tuple):
        children = cast("Sequence[Json]", value)
    return [child for child in children if isinstance(child, dict | list | tuple)]


def parse_json(text: str) -> Json:
    """The JSON in a text that somebody else wrote. Raises ValueError for whatever is not JSON, also for nesting beyond DEEPEST:
    what walks through the value, and every serialiser, then comes to its end.

    >>> parse_json('{"a": [1]}')
    {'a': [1]}
    >>> parse_json("NaN")
    Traceback (most recent call last):
    ValueError: JSON has no NaN
    """
    try:
        value: Json = STRICT_DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if too_deep(value, text.count("{") + text.count("[")):
        raise ValueError(f"nested too deeply: {DEEPEST} levels are the limit")
    return value


def read_text(file: Path) -> str:
    """The text of a UTF-8 file. Raises ConfigError, also for a folder or a pipe, which would be read without end."""
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} cannot be read: no regular file")
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def read_json(file: Path) -> Json:
    """The JSON of a UTF-8 file, with or without a byte order mark.

    Raises OSError, and ValueError for whatever is not JSON, also for other bytes and too deep nesting.
    """
    try:
        return json.loads(file.read_text("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
