"""Scenario files: JSONL, JSON, CSV and saved Hugging Face datasets, checked row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.json_files import read_json
from offbook.base.types import Json, Scenario
from offbook.client.rollouts.dataset import unpadded_row

from .file_rows import FileRow, Place, csv_rows, json_rows, jsonl_rows, row_of
from .identity import scenario_id

READERS: dict[str, Callable[[Path], Iterator[FileRow]]] = {".jsonl": jsonl_rows, ".json": json_rows, ".csv": csv_rows}
ONE, SEVERAL = "dataset_info.json", "dataset_dict.json"
"""The files by which a saved Dataset and a saved DatasetDict are known."""
SHOWN_FAULTS = 20


def load_scenarios(path: str | Path) -> list[Scenario]:
    """The scenarios of a `.jsonl`, `.json` or `.csv` file, or of a folder that `save_to_disk` of Hugging Face's datasets
    wrote (`folder:train` names a split). Raises ConfigError that lists each fault with its line, or row from 0."""
    dataset = dataset_folder(Path(path))
    if dataset is not None:
        folder, split = dataset
        return _checked(dataset_rows(folder, split), str(path), "row", ": row ")
    file = Path(path)
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"scenarios: {str(path)!r} is neither a file that ends in {', '.join(READERS)} nor the folder of a saved "
            "dataset"
        )
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


def dataset_folder(path: Path) -> tuple[Path, str | None] | None:
    """The folder that `folder` or `folder:split` names, and the split; None where there is no such folder."""
    if path.is_dir():
        return path, None
    folder, colon, split = str(path).rpartition(":")
    return (Path(folder), split) if colon and Path(folder).is_dir() else None


def dataset_rows(folder: Path, split: str | None) -> Iterator[FileRow]:
    """The rows with their index. Raises ConfigError for a folder or split that is none, MissingExtraError."""
    dataset = _loaded(_one_dataset(folder, split))
    for name, feature in dataset.features.items():
        if getattr(feature, "decode", False):  # an image, say: its bytes need no decoder to be refused
            dataset = dataset.cast_column(name, dataclasses.replace(feature, decode=False))
    rows = iter(dataset.with_format(None))
    for index in range(len(dataset)):
        try:
            row = next(rows)
        except Exception as error:  # whatever a damaged file makes Arrow raise
            raise ConfigError(
                f"{folder}: row {index}: cannot be read: {type(error).__name__}: {error!s:.500}"
            ) from error
        yield row_of(index, unpadded_row(row, dataset.features), "column")


def _one_dataset(folder: Path, split: str | None) -> Path:
    """The folder of the one dataset that is meant: a saved DatasetDict has one for each split."""
    if (folder / SEVERAL).is_file():
        splits = _splits(folder / SEVERAL)
        if split is None:
            raise ConfigError(f"scenarios: {folder} holds {', '.join(splits)}: name one, as in {folder}:{splits[0]}")
        if split not in splits:
            raise ConfigError(f"scenarios: {folder} has no split {split!r}; it holds {', '.join(splits)}")
        return folder / split
    if not (folder / ONE).is_file():
        raise ConfigError(
            f"scenarios: {folder} is a folder without {ONE} or {SEVERAL}, so it is not a dataset that save_to_disk "
            "wrote: name a "
            ".jsonl, .json or .csv file, or save it with `datasets.load_dataset(...).save_to_disk(folder)`"
        )
    if split is not None:
        raise ConfigError(f"scenarios: {folder} holds one dataset without splits: leave out ':{split}'")
    return folder


def _splits(file: Path) -> list[str]:
    try:
        content: Json = read_json(file)
        splits = [str(name) for name in content["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"scenarios: {file} cannot be read: {error!r}") from error
    if not splits:
        raise ConfigError(f"scenarios: {file} names no splits")
    return splits


def _loaded(folder: Path) -> Any:
    library = _datasets()
    try:
        return library.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder makes the library raise
        raise ConfigError(
            f"scenarios: the dataset in {folder} cannot be loaded: {type(error).__name__}: {error!s:.500}"
        ) from error


def _datasets() -> ModuleType:
    try:
        import datasets  # pyright: ignore[reportMissingTypeStubs]
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "datasets", "hf") from error
    return datasets
