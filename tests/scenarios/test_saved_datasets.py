"""Saved Hugging Face datasets as scenario files: rows, splits, and faults by row and column."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import offbook
from offbook.base.errors import ConfigError, MissingExtraError, install_command
from offbook.scenarios.loading import load_scenarios
from offbook.trainer.trainer import checked_scenarios

datasets: Any
try:
    import datasets
except ModuleNotFoundError:
    datasets = None  # the fixture below skips


@pytest.fixture(autouse=True)
def library(require: Callable[[bool, str], None]) -> None:
    require(datasets is not None, install_command("hf"))
    datasets.disable_progress_bars()


def faults(file: Path | str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_scenarios(file)
    return [line.removeprefix(f"{file}:") for line in str(caught.value).splitlines()]


def saved(folder: Path, rows: list[dict[str, Any]] | dict[str, list[dict[str, Any]]]) -> Path:
    if isinstance(rows, dict):
        datasets.DatasetDict({name: datasets.Dataset.from_list(each) for name, each in rows.items()}).save_to_disk(
            folder
        )
    else:
        datasets.Dataset.from_list(rows).save_to_disk(folder)
    return folder


def test_a_saved_dataset_loads_with_dates_as_text(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "prompt": "a", "when": datetime(2026, 1, 2, 3, 4), "facts": {"sizes": [1, 2]}},
        {"id": None, "prompt": None, "when": None, "facts": None},
    ]
    first, second = load_scenarios(saved(tmp_path / "data", rows))
    assert (first.id, first["when"], first["facts"]) == ("7", "2026-01-02T03:04:00", {"sizes": [1, 2]})
    assert second.prompt is None
    assert re.fullmatch("[0-9a-f]{10}", second.id or "")  # no words, so its hash alone


def test_arrays_load_as_lists_whatever_format_the_dataset_had(tmp_path: Path) -> None:
    found = datasets.Dataset.from_list([{"prompt": "a", "grid": [[1.0, 2.0], [3.0, 4.0]]}])
    found.cast_column("grid", datasets.Array2D((2, 2), "float32")).with_format("numpy").save_to_disk(tmp_path / "data")
    [scenario] = load_scenarios(tmp_path / "data")
    assert scenario["grid"] == [[1.0, 2.0], [3.0, 4.0]]


NESTED: list[dict[str, Any]] = [
    {
        "id": "a",
        "tools": [
            {"name": "weather", "args": {"city": {"type": "string"}}},
            {"name": "order", "args": {"id": {"enum": [1]}}},
        ],
        "deep": {"list": [[{"a": [{"x": 1}, {"y": None}]}], [{"b": {}}]], "word": "w"},
        "nothing": None,
    },
    {"id": "b", "tools": [{"name": "none", "args": {}}], "deep": {"list": [None, []]}, "nothing": 1},
]
UNPADDED = [
    {**NESTED[0], "deep": {"list": [[{"a": [{"x": 1}, {}]}], [{"b": {}}]], "word": "w"}},
    NESTED[1],
]


def test_nested_columns_have_no_keys_of_other_rows_at_any_depth(tmp_path: Path) -> None:
    """Arrow gives each object the keys of all others. A row's own null stays; inside values null and absent are one."""
    dataset = datasets.Dataset.from_list(NESTED)
    assert [
        scenario.model_dump(exclude={"prompt"}) for scenario in load_scenarios(saved(tmp_path / "a", NESTED))
    ] == UNPADDED
    for rows in (dataset, dataset.with_format("numpy").with_format(None), dataset.to_iterable_dataset()):
        assert checked_scenarios(rows, "scenarios") == UNPADDED
    assert [item for batch in offbook.iterate_dataset(dataset, 2, shuffle=False) for item in batch.items] == UNPADDED


def test_nulls_of_a_json_column_are_the_users() -> None:
    features = datasets.Features({"id": datasets.Value("string"), "schema": datasets.Json()})
    rows = [{"id": "a", "schema": {"default": None}}, {"id": "b", "schema": {"type": "string"}}]
    assert checked_scenarios(datasets.Dataset.from_list(rows, features=features), "scenarios") == rows


def test_the_split_of_a_saved_dataset_dict_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]})
    assert [each.prompt for each in load_scenarios(f"{folder}:test")] == ["b"]
    assert [each.prompt for each in load_scenarios(folder / "train")] == ["a"]
    with pytest.raises(ConfigError, match=f"holds train, test: name one, as in {folder}:train"):
        load_scenarios(folder)
    with pytest.raises(ConfigError, match="has no split 'val'; it holds train, test"):
        load_scenarios(f"{folder}:val")
    with pytest.raises(ConfigError, match="without splits: leave out ':train'"):
        load_scenarios(f"{saved(tmp_path / 'one', [{'prompt': 'a'}])}:train")


def test_a_fault_in_a_saved_dataset_names_row_and_column(tmp_path: Path) -> None:
    rows = [{"id": "a", "score": 1.0}, {"id": "b", "score": float("nan")}, {"id": "a", "score": 2.0}]
    assert faults(saved(tmp_path / "numbers", rows)) == [
        " row 1: column 'score': JSON has no nan; use null, or leave it out",
        " row 2: the same scenario (id 'a') as in row 0",
    ]
    bytes_and_spans = [{"prompt": "a", "raw": b"abc"}], [{"prompt": "a", "span": timedelta(1)}]
    for number, (rows, kind) in enumerate(zip(bytes_and_spans, ("bytes", "timedelta"), strict=True)):
        assert f"{kind} is not a JSON value" in faults(saved(tmp_path / str(number), rows))[0]
    features = datasets.Features({"prompt": datasets.Value("string"), "photo": datasets.Image()})
    rows = {"prompt": ["a", "b"], "photo": [None, {"bytes": b"not decoded", "path": None}]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "photos")
    assert faults(tmp_path / "photos") == [
        " row 1: column 'photo'['bytes']: bytes is not a JSON value; store text or numbers, or a path to the file"
    ]


def test_a_damaged_dataset_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "data", [{"prompt": "a"}])
    next(folder.glob("*.arrow")).write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"the dataset in .*data cannot be loaded: ArrowInvalid"):
        load_scenarios(folder)


def test_datasets_is_imported_for_a_folder_only_and_named_when_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    code = (
        "import sys; from offbook.scenarios.loading import load_scenarios; load_scenarios('a.jsonl'); "
        "sys.exit('datasets' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    folder = saved(tmp_path / "data", [{"prompt": "a"}])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=re.escape(f"datasets is not installed: {install_command('hf')}")):
        load_scenarios(folder)
