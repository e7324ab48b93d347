"""The memory layouts: how sampler and learner share one GPU, and which parts it holds during sampling and during a
step."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from offbook.base.server_options import MemoryLayout

from .parts import Parts

LAYOUTS: tuple[MemoryLayout, ...] = get_args(MemoryLayout)
"""All layouts, the quickest first.

* side_by_side: both stay on the GPU, and calls are answered during a step.
* free_cache: vLLM frees its key-value cache for a step and keeps its weights.
* offload: the learner's weights, adapter and optimizer are in host memory while vLLM samples; vLLM sleeps during a step."""

_ALL = tuple(field.name for field in fields(Parts))
_LEARNER_STATE = ("learner_weights", "learner_adapter", "learner_optimizer")
_STEP_ONLY = ("learner_gradients", "learner_activations")
_SAMPLING: dict[MemoryLayout, tuple[str, ...]] = {
    "side_by_side": _ALL,
    "free_cache": tuple(name for name in _ALL if name not in _STEP_ONLY),
    "offload": tuple(name for name in _ALL if name not in _STEP_ONLY + _LEARNER_STATE),
}
_STEP: dict[MemoryLayout, tuple[str, ...]] = {
    "side_by_side": _ALL,
    "free_cache": tuple(name for name in _ALL if name != "cache"),
    "offload": ("cuda_graphs", *_LEARNER_STATE, *_STEP_ONLY, "contexts"),
}


def sampling_parts(layout: MemoryLayout, held: Parts) -> dict[str, int]:
    """Part -> bytes on the GPU while calls are answered."""
    return {name: getattr(held, name) for name in _SAMPLING[layout]}


def step_parts(layout: MemoryLayout, held: Parts) -> dict[str, int]:
    """Part -> bytes on the GPU at the peak of a step."""
    return {name: getattr(held, name) for name in _STEP[layout]}


def peak_bytes(layout: MemoryLayout, held: Parts) -> int:
    """Most bytes on the GPU at any time, with the smallest cache."""
    return max(sum(sampling_parts(layout, held).values()), sum(step_parts(layout, held).values()))
