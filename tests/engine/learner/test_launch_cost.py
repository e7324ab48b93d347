"""The planner's constant of a card: measured once, kept, and never a reason to fail."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from offbook.engine.learner.model import launch_cost
from offbook.engine.learner.model.launch_cost import (
    PLAUSIBLE,
    kept,
    kept_call_flops,
    measure,
)

CARD = "NVIDIA H200, torch 2.13.0"


def test_a_card_is_measured_once_and_its_value_kept_for_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "planner.json"
    calls: list[float] = []

    def measured() -> float:
        calls.append(1.0)
        return 7.654e8

    assert [kept(file, CARD, measured, 5e8) for _ in range(2)] == [7.7e8, 7.7e8] and len(calls) == 1
    assert kept(file, "another card", lambda: 1e9, 5e8) == 1e9
    assert json.loads(file.read_text("utf-8")) == {CARD: 7.7e8, "another card": 1e9}


@pytest.mark.parametrize("content", ["", "[1]", '{"NVIDIA H200, torch 2.13.0": "7"}'])
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: str) -> None:
    file = tmp_path / "planner.json"
    file.write_text(content, "utf-8")
    assert kept(file, CARD, lambda: 6e8, 5e8) == 6e8 == json.loads(file.read_text("utf-8"))[CARD]


def test_what_cannot_be_measured_or_believed_leaves_the_assumed_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lost() -> float:
        raise RuntimeError("CUDA error: device lost")

    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path / "planner.json", CARD, lost, 5e8) == 5e8
        assert kept(tmp_path / "planner.json", CARD, lambda: 3e12, 5e8) == 5e8
        assert kept(tmp_path / "absent" / "planner.json", CARD, lambda: 6e8, 5e8) == 6e8
    assert [record.getMessage().split(";")[0] for record in caplog.records][:2] == [
        "Operations per kernel launch were not measured (CUDA error: device lost)",
        "3.0e+12 operations per kernel launch are not plausible",
    ]
    assert "was not written" in caplog.text and not (tmp_path / "planner.json").exists()


def test_the_measurement_runs_and_a_cpu_keeps_the_fixed_value(tmp_path: Path) -> None:
    assert PLAUSIBLE[0] / 100 < measure(torch.device("cpu"), torch.float32, size=128) < PLAUSIBLE[1]
    assert kept_call_flops(tmp_path / "planner.json", torch.device("cpu"), 2e5) == 2e5
    assert not (tmp_path / "planner.json").exists()


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_a_gpu_is_measured_in_a_precision_that_it_computes_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    measured: list[torch.dtype] = []

    def measuring(_: torch.device, dtype: torch.dtype) -> float:
        measured.append(dtype)
        return 6e8

    monkeypatch.setattr(launch_cost, "measure", measuring)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert kept_call_flops(tmp_path / "planner.json", torch.device("cuda", 0), 5e8) == 6e8 and measured == [dtype]
