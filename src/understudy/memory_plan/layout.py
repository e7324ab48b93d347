"""How the two sides share one GPU, and what each way holds there while calls are answered and during a step."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from ..config import MemoryLayout
from .parts import Parts

LAYOUTS: tuple[MemoryLayout, ...] = get_args(MemoryLayout)
"""The quickest first. side_by_side: both sides stay, calls go on during a step. free_cache: vLLM gives its cache back for a
step, its weights stay. offload: the learner's weights, adapter and optimizer are in host memory while vLLM runs; vLLM sleeps
for a step."""

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
_HOST: dict[MemoryLayout, tuple[str, ...]] = {
    "side_by_side": (),
    "free_cache": (),
    "offload": ("sampler_weights", "sampler_adapters", *_LEARNER_STATE),
}


def sampling_parts(layout: MemoryLayout, held: Parts) -> dict[str, int]:
    """Bytes on the GPU while calls are answered, by the name of the part."""
    return {name: getattr(held, name) for name in _SAMPLING[layout]}


def step_parts(layout: MemoryLayout, held: Parts) -> dict[str, int]:
    """Bytes on the GPU at the peak of a step, by the name of the part."""
    return {name: getattr(held, name) for name in _STEP[layout]}


def host_bytes(layout: MemoryLayout, held: Parts) -> int:
    """In host memory: the learner's copy, which stays there, and what vLLM puts there when it sleeps."""
    return sum(getattr(held, name) for name in _HOST[layout])


def peak_bytes(layout: MemoryLayout, held: Parts) -> int:
    """The most that is on the GPU at any time, with the least cache."""
    return max(sum(sampling_parts(layout, held).values()), sum(step_parts(layout, held).values()))
