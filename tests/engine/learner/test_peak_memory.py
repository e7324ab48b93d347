"""What a step's metrics say of a GPU's memory, from the readings that torch and the driver give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from offbook.engine.learner import peak_memory
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.peak_memory import MemoryReading, memory_metrics
from tests.engine.learner.jobs import LORA, command, random_groups, write_toy_base

GIB = 2**30
CUDA = torch.device("cuda", 1)


def test_the_devices_peak_is_what_is_used_now_and_what_torch_has_given_back_since() -> None:
    # 80 GiB, 30 free now; torch holds 6 now and held 18 at its peak, 15 of them in tensors: 50 + 12 at the peak.
    reading = MemoryReading(peak=15 * GIB, held_peak=18 * GIB, held=6 * GIB, free=30 * GIB, total=80 * GIB)
    assert memory_metrics(reading) == {
        "memory/learner_peak": 15.0,
        "memory/learner_held": 18.0,
        "memory/gpu_peak": 62.0,
    }


def test_torchs_own_counters_are_read_of_the_device_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    counters = {
        "max_memory_allocated": 15,
        "max_memory_reserved": 18,
        "memory_reserved": 6,
        "mem_get_info": (30, 80),
        "reset_peak_memory_stats": None,
    }
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: (asked.append(device), value)[1])
    peak_memory.reset(CUDA)
    assert peak_memory.read(CUDA) == MemoryReading(peak=15, held_peak=18, held=6, free=30, total=80)
    assert asked == [CUDA] * 5


def test_a_cpu_counts_nothing_and_a_step_there_has_no_such_metric(tmp_path: Path) -> None:
    assert peak_memory.read(torch.device("cpu")) is None
    policy = Policy.load(write_toy_base(tmp_path / "base"), LORA, threads=1)
    result = Learner(policy, "toy", lambda _: None).train(command(tmp_path, random_groups(0), 0))
    assert result.applied and not [name for name in result.metrics if name.startswith("memory/")]


def test_a_step_counts_from_its_own_beginning_and_its_checkpoint_keeps_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[torch.device] = []
    monkeypatch.setattr(peak_memory, "reset", resets.append)
    monkeypatch.setattr(
        peak_memory, "read", lambda device: MemoryReading(len(resets) * GIB, 2 * GIB, 2 * GIB, GIB, 8 * GIB)
    )
    learner = Learner(Policy.load(write_toy_base(tmp_path / "base"), LORA, threads=1), "toy", lambda _: None)
    for step in range(2):
        result = learner.train(command(tmp_path, random_groups(step), step))
        assert result.metrics["memory/learner_peak"] == step + 1
        note = json.loads((Path(result.checkpoint or "") / "offbook.json").read_text("utf-8"))
        assert note["metrics"]["memory/gpu_peak"] == 7.0
    assert resets == [torch.device("cpu")] * 2
