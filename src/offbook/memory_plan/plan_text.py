"""A memory plan as text, and as JSON."""

from __future__ import annotations

from offbook.base.text import counted
from offbook.base.types import Json

from .card import GIB
from .cards_plan import LEARNER_SHARE, CardsPlan
from .host import PROCESSES
from .layout import sampling_parts, step_parts
from .parts import CALL_TOKENS
from .plan import MemoryPlan

LABELS = {
    "sampler_weights": "vLLM: weights",
    "sampler_adapters": "vLLM: LoRA slots",
    "sampler_activations": "vLLM: activations",
    "cuda_graphs": "vLLM: CUDA graphs (assumed)",
    "cache": "vLLM: key-value cache, smallest",
    "learner_weights": "learner: weights",
    "learner_adapter": "learner: adapter",
    "learner_optimizer": "learner: optimizer",
    "learner_gradients": "learner: gradients",
    "learner_activations": "learner: activations",
    "contexts": "CUDA contexts, reserve (assumed)",
}
"""Part -> its name in the text. `assumed` parts are constants, the others are counted."""
REPLICA, LEARNER = "replica", "learner"
"""Headings of a card that samples, and of one that trains."""
MEANING = {
    "side_by_side": "sampler and learner stay on the GPU; calls are answered during a step",
    "free_cache": "vLLM frees its key-value cache for a step and keeps its weights",
    "offload": "the learner is in host memory while vLLM samples; vLLM sleeps during a step",
}
"""Layout -> one line that explains it."""
_WIDTH = max(map(len, LABELS.values()))


def plan_lines(plan: MemoryPlan) -> list[str]:
    """The plan as lines: the parts in GiB, their sums, the row size and the cache."""
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
    if plan.unrecomputed_tokens:
        lines.append(
            f"  rows of at most {plan.unrecomputed_tokens:,} tokens are trained without activation recomputation"
        )
    copies = f"{(plan.host - PROCESSES) / GIB:.1f} pinned, " if plan.host > PROCESSES else ""
    lines.append(f"  host memory: {plan.host / GIB:.1f} GiB ({copies}{PROCESSES / GIB:.0f} for the processes, assumed)")
    if (longest := plan.work.longest(plan.shape)) > plan.row_tokens:
        lines.append(
            f"  a call of more than {plan.row_tokens:,} tokens may not fit in a step; the longest is {longest:,}: "
            f"--max-model-len {plan.row_tokens}"
        )
    return lines


def headline(plan: MemoryPlan) -> str:
    """One line: the base, the card and the layout."""
    return f"Memory plan: {plan.base} on {plan.card.described}: {plan.layout}"


def plan_json(plan: MemoryPlan) -> dict[str, Json]:
    """The plan as JSON, sizes in bytes."""
    return {
        "base": plan.base,
        "card": plan.card.name,
        "memory": plan.card.memory,
        "layout": plan.layout,
        "row_tokens": plan.row_tokens,
        "unrecomputed_tokens": plan.unrecomputed_tokens,
        "cache_tokens": plan.cache_tokens,
        "sampling": sampling_parts(plan.layout, plan.parts),
        "step": step_parts(plan.layout, plan.parts),
        "host": plan.host,
    }


def cards_lines(plan: CardsPlan) -> list[str]:
    """The plan for several cards as lines: the options that divide them so, why, and the parts of both sides in GiB a card."""
    split, cards = plan.tensor_parallel, f"{counted(plan.count, 'card')} of {plan.card.described}"
    why = "as few as hold the wanted calls" if split > 1 else "the base and its cache fit"
    lines = [
        f"Memory plan: {plan.base} on {cards}",
        f"  offbook serve --model {plan.base} {plan.options()}",
        f"  {counted(plan.replicas, 'replica')}, each on {counted(split, 'card')} ({why}): cache for {plan.cache_tokens:,} "
        f"tokens, {plan.cache_calls:,} calls of {CALL_TOKENS:,}",
    ]
    if plan.learners:
        holds = "which shard the base (no GPU has run this)" if plan.shard else "each with the whole base"
        lines.append(f"  {counted(plan.learners, 'learner')}, {holds}: rows of at most {plan.row_tokens:,} tokens")
        lines.append(
            f"  one card in {LEARNER_SHARE} trains, at least one, and those that make no whole replica (a rule of thumb)"
        )
    lines.append(f"  {'GiB on each card':<{_WIDTH}}  {REPLICA:>8}{LEARNER:>8}")
    for name, label in LABELS.items():
        lines.append(f"  {label:<{_WIDTH}}  {_gib(plan.replica.get(name))}{_gib(plan.learner.get(name))}")
    sums = [sum(side.values()) for side in (plan.replica, plan.learner)]
    lines.append(f"  {'sum':<{_WIDTH}}  {_gib(sums[0])}{_gib(sums[1])}")
    return lines


def cards_json(plan: CardsPlan) -> dict[str, Json]:
    """The plan for several cards as JSON, sizes in bytes on each card."""
    return {
        "base": plan.base,
        "card": plan.card.name,
        "memory": plan.card.memory,
        "cards": plan.count,
        "replicas": plan.replicas,
        "tensor_parallel": plan.tensor_parallel,
        "learners": plan.learners,
        "shard": plan.shard,
        "row_tokens": plan.row_tokens,
        "cache_tokens": plan.cache_tokens,
        "options": plan.options(),
        REPLICA: plan.replica,
        LEARNER: plan.learner,
    }


def _gib(count: int | None) -> str:
    return f"{count / GIB:8.2f}" if count is not None else f"{'-':>8}"
