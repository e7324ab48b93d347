"""Scenario files: JSONL, CSV and saved Hugging Face datasets, checked row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.types import Scenario

from .file_rows import FileRow, Place
from .identity import scenario_id
from .saved_dataset import dataset_folder, dataset_rows
from .text_files import csv_rows, jsonl_rows

READERS: dict[str, Callable[[Path], Iterator[FileRow]]] = {".jsonl": jsonl_rows, ".csv": csv_rows}
SHOWN_FAULTS = 20


def load_scenarios(path: str | Path) -> list[Scenario]:
    """The scenarios of a `.jsonl` or `.csv` file, or of a folder that `save_to_disk` of Hugging Face's datasets wrote
    (`folder:train` names a split). Raises ConfigError that lists each fault with its line, or row from 0."""
    found = dataset_folder(Path(path))
    if found is not None:
        folder, split = found
        return _checked(dataset_rows(folder, split), str(path), "row", ": row ")
    file = Path(path)
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"scenarios: {str(path)!r} ends in none of {', '.join(READERS)}, and is no folder of a saved dataset"
        )
    try:
        return _checked(reader(file), str(path), "line", ":")
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
        raise ConfigError(f"scenarios: {source} holds none")
    return scenarios


def _scenario(row: FileRow) -> tuple[Scenario | None, str]:
    """The scenario of a row, or its fault."""
    if row.values is None:
        return None, row.fault
    own, prompt = row.values.get("id"), row.values.get("prompt")
    if own is not None and (isinstance(own, bool) or not isinstance(own, str | int | float)):
        return None, f"`id` must be text or a number, got {own!r:.200}"
    if prompt is not None and not isinstance(prompt, str):
        return None, f"`prompt` must be text, got {prompt!r:.200}"
    return Scenario(**{**row.values, "id": None if own in (None, "") else str(own)}), ""
