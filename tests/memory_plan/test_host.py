"""Host memory: the blocks that torch pins for the copies of `offload`, and the settings that it is told them by."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offbook.base import devices
from offbook.base.devices import learner_settings, sampler_settings
from offbook.base.server_options import EngineOptions
from offbook.engine.inference.vllm.command import Place, environment
from offbook.memory_plan.parts import (
    GIB,
    PROCESSES,
    Workload,
    find_shape,
    host_bytes,
    learner_tensors,
    parse_card,
    parts,
    pinned_block,
    published,
    sampler_segments,
)
from offbook.server.base_model import find
from offbook.server.training.learner_client import LearnerClient

NAMES = [base.name for base in published()]
SEVEN = "Qwen/Qwen2.5-7B-Instruct"
MIB = 2**20


@pytest.mark.parametrize("name", [SEVEN, "Qwen/Qwen3-4B", "meta-llama/Llama-3.1-8B-Instruct"])
def test_the_learners_base_has_the_tensors_that_are_counted(name: str) -> None:
    [config] = [dict(base.config) for base in published() if base.name == name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    tensors = Counter(weight.numel() * 2 for weight in model.parameters())
    counted: Counter[int] = Counter()
    for size, count in learner_tensors(find_shape(name), Workload(rank=1)):
        counted[size] += count
    lora = Counter(
        {
            size: 3 * sum(size == 4 * width for pair in find_shape(name).linears for width in pair)
            for size in {4 * width for pair in find_shape(name).linears for width in pair}
        }
    )
    counted.subtract({size: count * find_shape(name).layers for size, count in lora.items()})
    assert +counted == tensors


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_hold_the_plans_parts_and_little_more(name: str, four_bit: bool) -> None:
    shape, work = find_shape(name), Workload(four_bit=four_bit)
    held = parts(shape, parse_card("24GB"), work, 2048)
    learner = sum(size * count for size, count in learner_tensors(shape, work))
    assert learner == pytest.approx(held.learner_state, rel=1e-4)
    sampler = sum(size * count for size, count in sampler_segments(shape, work))
    assert (
        held.sampler_weights + held.sampler_adapters <= sampler < 1.06 * (held.sampler_weights + held.sampler_adapters)
    )
    copies = host_bytes("offload", shape, work) - PROCESSES
    assert learner + sampler <= copies < 1.05 * (learner + sampler)


def test_torchs_default_would_nearly_double_the_copies_of_7b() -> None:
    """A weight of 3,584 x 18,944 in 16 bits is 129.5 MiB; its power of two is 256 MiB."""
    assert pinned_block(3584 * 18944 * 2, None) == 256 * MIB and pinned_block(3584 * 18944 * 2) == 3584 * 18944 * 2
    assert (pinned_block(MIB), pinned_block(MIB + 1), pinned_block(7168), pinned_block(4)) == (MIB, MIB + 1, 8192, 4096)
    shape = find_shape(SEVEN)
    rounded, ours = (host_bytes("offload", shape, Workload(), above) / GIB for above in (None, MIB))
    assert 56 < rounded < 59 and 31 < ours < 33
    assert host_bytes("side_by_side", shape, Workload()) == host_bytes("free_cache", shape, Workload()) == PROCESSES


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
