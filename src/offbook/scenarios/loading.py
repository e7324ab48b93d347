"""Scenario files: JSONL, JSON and CSV, checked row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.types import Scenario

from .file_rows import FileRow, Place, csv_rows, json_rows, jsonl_rows
from .identity import scenario_id

READERS: dict[str, Callable[[Path], Iterator[FileRow]]] = {".jsonl": jsonl_rows, ".json": json_rows, ".csv": csv_rows}
SHOWN_FAULTS = 20


def load_scenarios(path: str | Path) -> list[Scenario]:
    """The scenarios of a `.jsonl`, `.json` or `.csv` file. Raises ConfigError that lists each fault with its line, or row from 0."""
    file = Path(path)
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(f"scenarios: {str(path)!r} is not a file that ends in {', '.join(READERS)}")
    try:
        word, joint = ("row", ": row ") if reader is json_rows else ("line", ":")
        return _checked(reader(file), str(path), word, joint)
    except OSError as error:
        raise ConfigError(f"scenarios: {file} cannot be read: {error.strerror or error}") from error


def _checked(rows: Iterable[FileRow], source: str, word: str, joint: str) -> list[Scenario]:
    faults: list[str] = []
    scenarios: list[Scenario] = []
    places: dict[str, Place] = {}
    for row in rows:
        scenario, fault = _scenario(row)
        name = "" if scenario is None else scenario_id(scenario)
        if name in places:
            fault = f"the same scenario (id {name!r}) as in {word} {places[name]}"
        if fault:
            faults.append(f"{source}{joint}{row.place}: {fault}")
        elif scenario is not None:
            places[name] = row.place
            scenarios.append(scenario.model_copy(update={"id": name}))
    if faults:
        more = [f"and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
        raise ConfigError("\n".join(faults[:SHOWN_FAULTS] + more))
    if not scenarios:
        raise ConfigError(f"scenarios: {source} holds no scenario")
    return scenarios


def _scenario(row: FileRow) -> tuple[Scenario | None, str]:
    if row.values is None:
        return None, row.fault
    own, prompt = row.values.get("id"), row.values.get("prompt")
    if own is not None and (isinstance(own, bool) or not isinstance(own, str | int | float)):
        return None, f"`id` must be text or a number, got {own!r:.200}"
    if prompt is not None and not isinstance(prompt, str):
        return None, f"`prompt` must be text, got {prompt!r:.200}"
    return Scenario(**{**row.values, "id": None if own in (None, "") else str(own)}), ""
