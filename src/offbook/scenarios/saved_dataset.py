"""A Hugging Face dataset that `save_to_disk` wrote, row by row. Loads `datasets` when it is asked for one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.types import Json
from offbook.client.rollouts.arrow_rows import unpadded_row

from .file_rows import FileRow, row_of

ONE, SEVERAL = "dataset_info.json", "dataset_dict.json"
"""The files by which a saved Dataset and a saved DatasetDict are known."""


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
            f"scenarios: {folder} is a folder without {ONE} or {SEVERAL}, so no dataset that save_to_disk wrote: name a "
            ".jsonl or .csv file, or save it with `datasets.load_dataset(...).save_to_disk(folder)`"
        )
    if split is not None:
        raise ConfigError(f"scenarios: {folder} holds one dataset without splits: leave out ':{split}'")
    return folder


def _splits(file: Path) -> list[str]:
    try:
        found: Json = json.loads(file.read_text(encoding="utf-8"))
        splits = [str(name) for name in found["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"scenarios: {file} cannot be read: {error!r}") from error
    if not splits:
        raise ConfigError(f"scenarios: {file} names no splits")
    return splits


def _loaded(folder: Path) -> Any:
    """The Dataset that the folder holds."""
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
