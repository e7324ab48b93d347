"""W&B's offline files, read back by W&B's own message types. Its reader of the file's frames is a Go program; they are LevelDB's log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import ConfigError
from offbook.contracts import StepFinished, TraceSink
from offbook.testing.sinks import RUN, check_sink, sample_events
from offbook.tracing.fanout import FanOut, show
from offbook.tracing.sink_registry import resolve_sinks
from tests.fakes.trace_server import until

wandb = pytest.importorskip("wandb", reason="pip install -r requirements/test.txt")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "CACHE_DIR": str(tmp_path / "cache"),
                        "DATA_DIR": str(tmp_path / "data"), "CONFIG_DIR": str(tmp_path / "config")}.items():  # fmt: skip
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield tmp_path
    wandb.teardown()  # W&B reads its variables once per process


def frames(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: blocks of 32 KiB, each piece with CRC, length and type (whole, first, middle,
    last). W&B's file begins with seven bytes of its own."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or kind == 0:
            at += left
            continue
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def records(folder: Path) -> Iterator[tuple[str, Any]]:
    """(file, record) of every offline run, once all are written: `finish()` returns a little earlier."""
    from wandb.proto import wandb_internal_pb2

    message: Any = wandb_internal_pb2

    def written(file: Path) -> bool:
        kinds = [message.Record.FromString(data).WhichOneof("record_type") for data in frames(file.read_bytes())]
        return kinds[-1:] == ["exit"]

    assert until(lambda: all(map(written, folder.glob("wandb/offline-run-*/run-*.wandb"))), 30)
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in frames(file.read_bytes()):
            record = message.Record()
            record.ParseFromString(data)
            yield file.name, record


def history(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for _, record in records(folder):
        if not record.HasField("history"):
            continue
        row: dict[str, Any] = {}
        for item in record.history.item:
            *outer, last = list(item.nested_key) or [item.key]
            place = row
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = json.loads(item.value_json)
        rows.append(row)
    return rows


def shown(sink: TraceSink, checkpoint: str) -> None:
    for event in sample_events(checkpoint=checkpoint):
        show(sink, event)
    sink.closed()


def lora(folder: Path) -> str:
    made = folder / "lora"
    made.mkdir()
    (made / "adapter_config.json").write_text("{}")
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    return str(made)


@pytest.mark.slow("W&B's own process, twice")
def test_every_metric_table_and_checkpoint_is_in_the_offline_files_and_a_restart_goes_on_under_the_id(
    folder: Path,
) -> None:
    [sink] = resolve_sinks(["wandb"])
    sink.check()
    path = lora(folder)
    shown(sink, path)
    rows = history(folder)
    by_step = {row["_step"]: row for row in rows}
    assert sorted(by_step) == [0, 1, 2]
    assert (by_step[0]["val/reward"], by_step[2]["val/success"], by_step[1]["train/entropy"]) == (0.5, 0.25, 1.5)
    assert by_step[2]["train/reward"] == 1.25 and by_step[2]["alert/kl"] == 12.0 and by_step[2]["step"] == 2
    assert by_step[2]["samples/val"]["_type"] == "table-file" and by_step[2]["samples/val"]["nrows"] == 4
    [table] = folder.glob("wandb/offline-run-*/files/media/table/samples/val_2_*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"][:5] == ["scenario", "index", "input", "output", "reward"]
    assert content["data"][1][:5] == ["box-0", 1, "Where is box 1?", "On shelf 7.", 0.25]
    found = [record.artifact for _, record in records(folder) if record.HasField("artifact")] + [
        record.request.log_artifact.artifact for _, record in records(folder) if record.HasField("request")
    ]
    loras = [each for each in found if each.type == "model"]
    assert [(each.name, sorted(each.aliases)) for each in loras] == [
        ("agent-lora", ["latest", "step-1"]), ("agent-lora", ["latest", "step-2"]),
    ]  # fmt: skip
    assert {entry.path for entry in loras[0].manifest.contents} == {"adapter_config.json", "adapter_model.safetensors"}
    shown(resolve_sinks(["wandb"])[0], path)
    ids = Counter(record.run.run_id for _, record in records(folder) if record.HasField("run"))
    assert set(ids) == {RUN}


def test_online_without_a_key_is_an_error_that_names_the_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    [sink] = resolve_sinks(["wandb"])
    with pytest.raises(ConfigError, match="set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"):
        sink.check()


@pytest.mark.slow("W&B's own process")
def test_a_server_that_is_away_is_no_wrong_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [event for event in sample_events() if isinstance(event, StepFinished)]
    for name, value in {"MODE": "online", "BASE_URL": "http://127.0.0.1:9", "API_KEY": "a" * 40}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    [sink] = resolve_sinks(["wandb"])
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9: ConnectError"):
        sink.check()
    fanout = FanOut([sink], RUN, [])
    for event in events:
        fanout.publish(event)
    [line] = fanout.close()
    assert "2 events" in line and not list(folder.glob("wandb/*run-*"))


@pytest.mark.slow("W&B's own process, three times")
def test_the_wandb_sink_conforms(folder: Path) -> None:
    """Offline each process writes a file of its own, under one id; `wandb sync` merges them by step."""

    def merged() -> set[str]:
        return {
            f"{row['_step']} {key}" for row in history(folder) for key in row if key.split("/")[0] in ("train", "val")
        }

    check_sink(lambda: resolve_sinks(["wandb"])[0], merged)
