"""Scenario files: JSONL and CSV, checked line by line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from understudy.errors import ConfigError
from understudy.types import Json, Scenario

from .identity import scenario_id


def load_scenarios(path: str | Path) -> list[Scenario]:
    """The scenarios of a `.jsonl` or `.csv` file. Raises ConfigError that lists each fault with its line number."""
    file = Path(path)
    readers: dict[str, Callable[[Path], list[tuple[int, Json]]]] = {".jsonl": _jsonl_rows, ".csv": _csv_rows}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"scenarios: {file.name!r} ends in none of {', '.join(readers)}")
    try:
        rows = reader(file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"scenarios: {file} cannot be read: {error}") from error
    return _checked(file, rows)


def _jsonl_rows(file: Path) -> list[tuple[int, Json]]:
    rows: list[tuple[int, Json]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").splitlines(), 1):
        if line.strip():
            try:
                rows.append((number, json.loads(line)))
            except ValueError as error:
                rows.append((number, ConfigError(f"not JSON: {error}")))
    return rows


def _csv_rows(file: Path) -> list[tuple[int, Json]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, restkey="(too many columns)")
        return [(reader.line_num, row) for row in reader]


def _checked(file: Path, rows: list[tuple[int, Json]]) -> list[Scenario]:
    faults: list[str] = []
    scenarios: list[Scenario] = []
    lines: dict[str, int] = {}
    for number, row in rows:
        fault = _fault(row)
        if fault is None:
            own = row.get("id")
            scenario = Scenario(**{**row, "id": None if own in (None, "") else str(own)})
            name = scenario_id(scenario)
            if name in lines:
                fault = f"the same scenario (id {name!r}) as in line {lines[name]}"
            else:
                lines[name] = number
                scenarios.append(scenario.model_copy(update={"id": name}))
        if fault is not None:
            faults.append(f"{file}:{number}: {fault}")
    if faults:
        raise ConfigError("\n".join(faults))
    if not scenarios:
        raise ConfigError(f"scenarios: {file} holds none")
    return scenarios


def _fault(found: Json) -> str | None:
    if isinstance(found, ConfigError):
        return str(found)
    if not isinstance(found, dict):
        return f"an object is needed, got {type(found).__name__}"
    row = cast(dict[str, Json], found)
    if "(too many columns)" in row:
        return "more values than the header has columns"
    if not isinstance(row.get("prompt", ""), str):
        return f"`prompt` must be text, got {row['prompt']!r}"
    return None
