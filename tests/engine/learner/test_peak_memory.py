"""What a step's metrics say of a GPU's memory, from the readings that torch and the driver give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from offbook.engine.learner import learner as learner_module
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.metrics import memory_metrics, reset_memory_peaks
from offbook.engine.learner.model.policy import Policy
from tests.engine.learner.jobs import LORA, command, random_groups, write_toy_base

GIB = 2**30
CUDA = torch.device("cuda", 1)


def test_the_devices_peak_is_what_is_used_now_and_what_torch_has_given_back_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 80 GiB, 30 free now; torch holds 6 now and held 18 at its peak, 15 of them in tensors: 50 + 12 at the peak.
    devices = read_as(monkeypatch, peak=15, held_peak=18, held=6, free=30, total=80)
    reset_memory_peaks(CUDA)
    assert memory_metrics(CUDA) == {
        "memory/learner_peak": 15.0,
        "memory/learner_held": 18.0,
        "memory/gpu_peak": 62.0,
    }
    assert devices == [CUDA] * 5


def test_a_cpu_counts_nothing_and_a_step_there_has_no_such_metric(tmp_path: Path) -> None:
    assert memory_metrics(torch.device("cpu")) == {}
    policy = Policy.load(write_toy_base(tmp_path / "base"), LORA, threads=1)
    result = Learner(policy, "toy", lambda _: None).train(command(tmp_path, random_groups(0), 0))
    assert result.applied and not [name for name in result.metrics if name.startswith("memory/")]


def test_a_step_counts_from_its_own_beginning_and_its_checkpoint_keeps_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[torch.device] = []
    monkeypatch.setattr(learner_module, "reset_memory_peaks", resets.append)
    monkeypatch.setattr(learner_module, "memory_metrics", lambda device: {"memory/gpu_peak": 6.0 + len(resets)})
    learner = Learner(Policy.load(write_toy_base(tmp_path / "base"), LORA, threads=1), "toy", lambda _: None)
    for step in range(2):
        result = learner.train(command(tmp_path, random_groups(step), step))
        note = json.loads((Path(result.checkpoint or "") / "offbook.json").read_text("utf-8"))
        assert note["metrics"]["memory/gpu_peak"] == result.metrics["memory/gpu_peak"] == 7.0 + step
    assert resets == [torch.device("cpu")] * 2


def read_as(
    monkeypatch: pytest.MonkeyPatch, *, peak: int, held_peak: int, held: int, free: int, total: int
) -> list[object]:
    """Let torch's counters read so, in GiB. Returns the devices that they are read of."""
    devices: list[object] = []
    counters = {
        "max_memory_allocated": peak * GIB,
        "max_memory_reserved": held_peak * GIB,
        "memory_reserved": held * GIB,
        "mem_get_info": (free * GIB, total * GIB),
        "reset_peak_memory_stats": None,
    }
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: (devices.append(device), value)[1])
    return devices
