"""A plan as a person reads it, and as JSON."""

from __future__ import annotations

from ..types import Json
from .card import GIB
from .layout import sampling_parts, step_parts
from .parts import CALL_TOKENS
from .plan import MemoryPlan

LABELS = {
    "sampler_weights": "vLLM: weights",
    "sampler_adapters": "vLLM: LoRA slots",
    "sampler_activations": "vLLM: activations",
    "cuda_graphs": "vLLM: CUDA graphs (assumed)",
    "cache": "vLLM: key-value cache, least",
    "learner_weights": "learner: weights",
    "learner_adapter": "learner: adapter",
    "learner_optimizer": "learner: optimizer",
    "learner_gradients": "learner: gradients",
    "learner_activations": "learner: activations",
    "contexts": "CUDA contexts, reserve (assumed)",
}
MEANING = {
    "side_by_side": "both sides stay on the GPU; calls go on during a step",
    "free_cache": "vLLM gives its key-value cache back for a step, its weights stay",
    "offload": "the learner is in host memory while vLLM runs; vLLM sleeps for a step",
}
_WIDTH = max(map(len, LABELS.values()))


def plan_lines(plan: MemoryPlan) -> list[str]:
    """The plan as lines: what is where in GiB, the sums, and what follows from it."""
    sampling, step = sampling_parts(plan.layout, plan.parts), step_parts(plan.layout, plan.parts)
    lines = [
        headline(plan),
        f"  {MEANING[plan.layout]}",
        f"  {'GiB':<{_WIDTH}}  sampling    step",
        *(f"  {label:<{_WIDTH}}  {_gib(sampling.get(name))}  {_gib(step.get(name))}" for name, label in LABELS.items()),
        f"  {'sum':<{_WIDTH}}  {_gib(plan.sampling)}  {_gib(plan.step)}",
        f"  rows of at most {plan.row_tokens:,} tokens (row_tokens {plan.work.row_tokens:,}); "
        f"cache for {plan.cache_tokens:,} tokens, {plan.cache_calls:,} calls of {CALL_TOKENS:,}",
    ]
    if plan.host:
        lines.append(f"  host memory: {plan.host / GIB:.1f} GiB")
    if (longest := plan.work.longest(plan.shape)) > plan.row_tokens:
        lines.append(
            f"  a call of more than {plan.row_tokens:,} tokens may not fit in a step; the longest is {longest:,}: "
            f"--max-model-len {plan.row_tokens}"
        )
    return lines


def headline(plan: MemoryPlan) -> str:
    """One line: the base, the card and the layout."""
    return f"Memory plan: {plan.base} on {plan.card.name} ({plan.card.memory / GIB:.1f} GiB): {plan.layout}"


def plan_json(plan: MemoryPlan) -> dict[str, Json]:
    """Bytes by part and phase, and what follows from them."""
    return {
        "base": plan.base,
        "card": plan.card.name,
        "memory": plan.card.memory,
        "layout": plan.layout,
        "row_tokens": plan.row_tokens,
        "cache_tokens": plan.cache_tokens,
        "sampling": sampling_parts(plan.layout, plan.parts),
        "step": step_parts(plan.layout, plan.parts),
        "host": plan.host,
    }


def _gib(count: int | None) -> str:
    return f"{count / GIB:8.2f}" if count is not None else f"{'-':>8}"
