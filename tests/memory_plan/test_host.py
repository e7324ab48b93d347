"""Host memory: the blocks that torch pins for the copies of `offload`, and the settings that it is told them by."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from offbook.base import devices
from offbook.base.devices import learner_settings, sampler_settings
from offbook.base.server_options import EngineOptions
from offbook.engine.inference.vllm.command import Place, environment
from offbook.memory_plan.parts import (
    PROCESSES,
    Workload,
    find_shape,
    host_bytes,
    parse_card,
    parts,
)
from offbook.server.base_model import find
from offbook.server.training.learner_client import LearnerClient

SEVEN = "Qwen/Qwen2.5-7B-Instruct"


def test_the_host_holds_the_learner_and_what_vllm_moves_there() -> None:
    shape = find_shape(SEVEN)
    held = parts(shape, parse_card("24GB"), Workload(), 2048)
    lora = shape.lora_parameters(16)
    copies = shape.parameters * 2 + lora * (4 + 8) + shape.parameters * 2 + 3 * lora * 2
    assert host_bytes("offload", held) == PROCESSES + copies
    assert host_bytes("side_by_side", held) == host_bytes("free_cache", held) == PROCESSES


def test_this_torch_rounds_as_it_is_counted() -> None:
    source = Path(torch.__file__).parent / "include/ATen/core/CachingHostAllocator.h"
    rule = " ".join(source.read_text("utf-8").split())
    condition = "if (size <= pinned_max_round_threshold() && size <= pinned_max_cached_size()) {"
    assert f"{condition} return c10::llvm::PowerOf2Ceil(size); " in rule


def test_both_children_pin_exact_sizes_and_the_learner_has_expandable_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    exact, both = "pinned_max_round_threshold_mb:1", "pinned_max_round_threshold_mb:1,expandable_segments:True"
    monkeypatch.setattr("platform.release", lambda: "6.8.0-generic")
    assert environment(Place("bfloat16", (0,)), None)["PYTORCH_ALLOC_CONF"] == exact
    client = LearnerClient(find("tiny"), EngineOptions(), tmp_path / "learner.log", offload=True)
    assert client._env()["PYTORCH_ALLOC_CONF"] == both
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    assert client._env()["PYTORCH_ALLOC_CONF"] == exact


def test_settings_of_the_user_stay_and_have_precedence() -> None:
    mine = {"PYTORCH_ALLOC_CONF": "expandable_segments:False,pinned_max_round_threshold_mb:8"}
    assert learner_settings(mine) == mine == sampler_settings(mine)
    old = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert sampler_settings(old)["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64,pinned_max_round_threshold_mb:1"


def test_an_older_torch_gets_no_setting_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 on an H100: ValueError: Unrecognized key 'pinned_max_round_threshold_mb' in CUDA allocator config."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.11.0+cu130")
    spec = spec_from_file_location("offbook.base.older", devices.__file__)
    assert spec is not None and spec.loader is not None
    older = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, older)
    spec.loader.exec_module(older)
    assert older.EXACT_MIB is None and older.sampler_settings({}) == {}
    assert older.learner_settings({}) in ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
