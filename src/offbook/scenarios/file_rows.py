"""Rows of JSONL, JSON and CSV files, before they are scenarios or conversations, and the values that may stand in them."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NoReturn, TypeAlias, cast

from offbook.base.errors import ConfigError
from offbook.base.types import Json
from offbook.base.user_values import json_value

Place: TypeAlias = int
"""The line where a row begins (from 1), or its index in an array or dataset (from 0)."""


BOM = b"\xef\xbb\xbf"
OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@dataclass(frozen=True)
class FileRow:
    """What was found at one place: the row's values by name, or its fault."""

    place: Place
    values: dict[str, Json] | None = None
    fault: str = ""


def row_of(place: Place, value: object, word: str) -> FileRow:
    """A row whose values are JSON, each named as `word` ("key", "column") in a fault."""
    if not isinstance(value, Mapping):
        return FileRow(place, fault=f"an object is needed, got {type(value).__name__}")
    named = cast(Mapping[str, object], value)
    try:
        return FileRow(place, {name: json_value(item, f"{word} {name!r}", _text) for name, item in named.items()})
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


def jsonl_rows(file: Path) -> Iterator[FileRow]:
    """Read one JSON object per line. Empty lines are skipped. Only a newline ends a line: text may hold any other character."""
    content = _content(file)
    if content[:64].lstrip().startswith(b"["):
        raise ConfigError(f"{file} begins with '[': an object a line is needed; one array goes into a file named .json")
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                parsed = _parsed(line)
            except ConfigError as error:
                yield FileRow(number, fault=str(error))
            else:
                yield row_of(number, parsed, "key")


def json_rows(file: Path) -> Iterator[FileRow]:
    """The objects of a file that is one JSON array, with their index. Raises ConfigError for any other file."""
    content = _content(file)
    try:
        rows = _parsed(content)
    except ConfigError as error:
        hint = (
            "; a file with an object a line ends in .jsonl" if isinstance(error.__cause__, json.JSONDecodeError) else ""
        )
        raise ConfigError(f"{file}: {error}{hint}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{file}: a JSON array of objects is needed, got {type(rows).__name__}")
    yield from (row_of(index, row, "key") for index, row in enumerate(cast(list[object], rows)))


def csv_rows(file: Path) -> Iterator[FileRow]:
    """A header, then a row of as many values each; all are text. Raises ConfigError for a header that names no fields."""
    content = _content(file)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: not UTF-8: byte {content[error.start]:#04x}") from error
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    names: list[str] | None = None
    begin = 1
    try:
        for values in reader:
            if values and names is None:
                names = _header(values, f"{file}:{begin}")
            elif values and names is not None and len(values) != len(names):
                yield FileRow(begin, fault=f"{len(values)} values, but the header has {len(names)} columns")
            elif values and names is not None:
                yield row_of(begin, dict(zip(names, values, strict=True)), "column")
            begin = reader.line_num + 1
    except csv.Error as error:
        yield FileRow(begin, fault=f"not CSV: {error}{_hint(error)}")


def _content(file: Path) -> bytes:
    content = file.read_bytes().removeprefix(BOM)
    other = OTHER_BOMS.get(content[:2])
    if other is not None:
        raise ConfigError(f"{file} is {other}; save it as UTF-8")
    return content


def _parsed(content: bytes) -> object:
    """The JSON value. Raises ConfigError for what is no JSON, and for a value that JSON has not."""
    try:
        return json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_float)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: byte {content[error.start]:#04x} at {error.start}") from error
    except RecursionError as error:
        raise ConfigError("nested too deeply") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}") from error


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ConfigError(f"the key {_twice([name for name, _ in pairs])} appears twice in an object")
    return unique


def _no_constant(text: str) -> NoReturn:
    raise ConfigError(f"JSON has no {text}; use null, or leave it out")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ConfigError(f"the number {text} is too large for a float")
    return value


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not all(names):
        raise ConfigError(f"{where}: column {names.index('') + 1} has no name")
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: the column {_twice(names)} appears twice")
    split_by = next((mark for mark in (";", "\t") if len(names) == 1 and mark in names[0]), None)
    if split_by is not None:
        raise ConfigError(f"{where}: one column, {names[0]!r}: separate columns by commas, not by {split_by!r}")
    return names


def _twice(names: list[str]) -> str:
    return repr(next(name for name, times in Counter(names).items() if times > 1))


def _hint(error: csv.Error) -> str:
    """What to do about the faults whose text does not say it."""
    text = str(error)
    if "field limit" in text:
        return ": put such long values into JSONL"
    return " (a quote that is not closed?)" if "unexpected end" in text else ""
