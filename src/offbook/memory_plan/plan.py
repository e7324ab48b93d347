"""The memory plan: which layout fits on a GPU, with how large rows, and what to change if none does. As text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from offbook.base.devices import gpus
from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineOptions, MemoryLayout
from offbook.base.types import Json

from .parts import (
    CALL_TOKENS,
    GIB,
    LAYOUTS,
    MIN_CALLS,
    PROCESSES,
    BaseShape,
    Card,
    Parts,
    Workload,
    cache_per_token,
    find_shape,
    host_bytes,
    parse_card,
    parts,
    peak_bytes,
    sampling_parts,
    step_parts,
)

MIN_ROW = 2048
"""Smallest row in tokens that is planned. Smaller rows could hold few calls."""
MAX_ROW = 131_072
"""Largest row in tokens that is tried."""
SHORT_CALL_TOKENS = 512
"""Tokens of a short call, prompt and completion."""
ROW_UNIT = 1024
"""Row sizes below the wanted one are multiples of this many tokens."""
ENOUGH_ROWS = 0.5
"""Share of the wanted row size that is large enough. With smaller rows, more of the shared tokens are computed several
times."""
ENOUGH_CALLS = 32
"""Number of calls that the cache should hold, so that vLLM decodes them in one batch."""
CARDS = ("16GB", "24GB", "32GB", "40GB", "48GB", "80GB", "141GB", "192GB")
"""Common sizes of GPUs, smallest first."""


@dataclass(frozen=True)
class MemoryPlan:
    """A layout that fits. `row_tokens` is the largest row, at most the wanted one. `cache_tokens` is the key-value
    cache that fits beside all other parts."""

    base: str
    shape: BaseShape
    card: Card
    work: Workload
    layout: MemoryLayout
    row_tokens: int
    parts: Parts
    cache_tokens: int

    @property
    def sampling(self) -> int:
        """Bytes on the GPU while calls are answered, with the smallest cache."""
        return sum(sampling_parts(self.layout, self.parts).values())

    @property
    def step(self) -> int:
        """Bytes on the GPU at the peak of a step."""
        return sum(step_parts(self.layout, self.parts).values())

    @property
    def host(self) -> int:
        """Bytes in host memory: the pinned copies of `offload`, and the processes' own."""
        return host_bytes(self.layout, self.parts)

    @property
    def sampler(self) -> int:
        """Bytes for vLLM: all that the learner's parts and the CUDA contexts leave free."""
        held = sampling_parts(self.layout, self.parts)
        others = sum(count for name, count in held.items() if name.startswith("learner")) + held["contexts"]
        return self.card.usable - others

    @property
    def decoded_calls(self) -> int:
        """Number of calls for vLLM to decode in one batch: `--max-batch`, else vLLM's default for the card, but at most
        the short calls that the cache holds. vLLM would preempt further calls and compute them again."""
        return self.work.max_batch or min(
            self.card.decoded_calls, max(MIN_CALLS, self.cache_tokens // SHORT_CALL_TOKENS)
        )

    @property
    def row_limit(self) -> int:
        """The largest row in tokens that fits, whatever the train config says."""
        if self.layout == "side_by_side":
            return self.row_tokens  # the cache fills the rest of the GPU
        largest = replace(self.work, row_tokens=max(self.work.row_tokens, MAX_ROW))
        return _largest_rows(self.shape, self.card, largest, self.layout) or self.row_tokens

    @property
    def cache_calls(self) -> int:
        """Number of calls of CALL_TOKENS that the cache holds."""
        return self.cache_tokens // min(CALL_TOKENS, self.work.longest(self.shape))


def make_plan(
    base: str, shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"] = "auto"
) -> MemoryPlan:
    """The plan with the layout `wanted`.

    `auto` takes the quickest layout with large enough rows and cache, else the one with the largest rows. Raises
    ConfigError that names the setting to change."""
    plan = _fitting(base, shape, card, work, wanted)
    if plan is None:
        raise ConfigError(_refusal(base, shape, card, work, wanted))
    return plan


def _fitting(
    base: str, shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"]
) -> MemoryPlan | None:
    """The plan of `make_plan`; None if no layout fits."""
    best: MemoryPlan | None = None
    for layout in LAYOUTS if wanted == "auto" else (wanted,):
        rows = _largest_rows(shape, card, work, layout)
        if rows is None:
            continue
        held = parts(shape, card, work, rows)
        plan = MemoryPlan(base, shape, card, work, layout, rows, held, _cache_tokens(shape, card, work, layout, held))
        if rows >= work.row_tokens * ENOUGH_ROWS and plan.cache_calls >= min(
            ENOUGH_CALLS, work.max_batch or ENOUGH_CALLS
        ):
            return plan
        if best is None or (rows, plan.cache_tokens) > (best.row_tokens, best.cache_tokens):
            best = plan
    return best


def _cache_tokens(shape: BaseShape, card: Card, work: Workload, layout: MemoryLayout, held: Parts) -> int:
    """Tokens of the key-value cache that fits beside all other parts."""
    room = card.usable - sum(sampling_parts(layout, held).values()) + held.cache
    return room // cache_per_token(shape, work)


def _largest_rows(shape: BaseShape, card: Card, work: Workload, layout: MemoryLayout) -> int | None:
    """The wanted row size, or the largest multiple of ROW_UNIT below it that fits. None if not even the smallest row
    fits."""
    for rows in row_sizes(work.row_tokens):
        if peak_bytes(layout, parts(shape, card, work, rows)) <= card.usable:
            return rows
    return None


def row_sizes(wanted: int) -> tuple[int, ...]:
    """Row sizes to try, in tokens, the largest first: the wanted one, and the multiples of ROW_UNIT below it down to MIN_ROW.

    >>> row_sizes(3500)
    (3500, 3072, 2048)
    """
    return wanted, *range((wanted - 1) // ROW_UNIT * ROW_UNIT, min(MIN_ROW, wanted) - 1, -ROW_UNIT)


def _settings(work: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield settings that take less memory, the cheapest first, with the workload that they lead to."""
    for calls in _halves(work.max_batch, 1):
        yield f"--max-batch {calls}", replace(work, max_batch=calls)
    for length in _halves(work.max_model_len, CALL_TOKENS):
        yield f"--max-model-len {length}", replace(work, max_model_len=length)
    fewer = replace(work, max_batch=32)
    if work.max_batch is None:
        yield "--max-batch 32", fewer
    if work.rank > 16:
        yield "--max-lora-rank 16", replace(work, rank=16)
    if not work.four_bit:
        yield "--load-in-4bit", replace(work, four_bit=True)
        if work.max_batch is None:
            yield "--load-in-4bit --max-batch 32", replace(fewer, four_bit=True)


def _halves(value: int | None, least: int) -> Iterator[int]:
    while value is not None and value // 2 >= least:
        value //= 2
        yield value


def remedy(shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"] = "auto") -> str:
    """The cheapest setting with which the base fits. If there is none: a larger card, or a smaller base."""
    if card.taken and _fitting("", shape, replace(card, taken=0), work, wanted) is not None:
        return f"the whole of {card.name}: end the other programs on it"
    if wanted != "auto" and _fitting("", shape, card, work, "auto") is not None:
        return "--memory-layout auto"
    for setting, other in _settings(work):
        if _fitting("", shape, card, other, "auto") is not None:
            return setting
    for text in CARDS:
        larger = parse_card(text)
        if larger.memory > card.memory and _fitting("", shape, larger, work, "auto") is not None:
            return f"a GPU of {text}, or a smaller --model"
    return "a smaller --model"


def _refusal(base: str, shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"]) -> str:
    rows = min(MIN_ROW, work.row_tokens)
    held = parts(shape, card, work, rows)
    layout = "offload" if wanted == "auto" else wanted
    sampling, step = (sum(held_in(layout, held).values()) for held_in in (sampling_parts, step_parts))
    others = f" ({card.taken / GIB:.1f} more are held by other programs)" if card.taken else ""
    phase, needed = ("sampling", sampling) if sampling >= step else (f"a step with rows of {rows:,} tokens", step)
    return (
        f"{base} does not fit on {card.name} with memory layout {layout}: {phase} needs {needed / GIB:.1f} of "
        f"{card.usable / GIB:.1f} GiB{others}. Take {remedy(shape, card, work, wanted)}"
    )


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
        "cache_tokens": plan.cache_tokens,
        "sampling": sampling_parts(plan.layout, plan.parts),
        "step": step_parts(plan.layout, plan.parts),
        "host": plan.host,
    }


def _gib(count: int | None) -> str:
    return f"{count / GIB:8.2f}" if count is not None else f"{'-':>8}"


COMMON = ("16GB", "24GB", "48GB", "80GB")
"""Cards that are planned for on a machine without a GPU."""


@dataclass(frozen=True)
class Planned:
    """The plan for a card. `plan` is None where the base does not fit; `refused` then names the setting to change."""

    card: Card
    plan: MemoryPlan | None
    refused: str = ""

    def lines(self) -> list[str]:
        """The plan as text."""
        return [self.refused] if self.plan is None else plan_lines(self.plan)

    def as_json(self) -> dict[str, Json]:
        """The plan as JSON."""
        if self.plan is None:
            return {"card": self.card.name, "refused": self.refused}
        return plan_json(self.plan)


def plans(
    model: str | None,
    card: str | None,
    options: EngineOptions,
    row_tokens: int | None,
    layout: str = "auto",
) -> list[Planned]:
    """A plan per card. Raises ConfigError for a base that cannot be read or planned, and for an unknown layout."""
    known: dict[str, MemoryLayout | Literal["auto"]] = {"auto": "auto", **{name: name for name in LAYOUTS}}
    if layout not in known:
        raise ConfigError(f"--memory-layout {layout!r} is unknown: use one of auto, {', '.join(LAYOUTS)}")
    if model is None:
        raise ConfigError("--card needs --model, the base to run, as in --model Qwen/Qwen2.5-7B-Instruct")
    here = [parse_card(card)] if card is not None else [Card(gpu.name, gpu.total) for gpu in gpus()[:1]]
    shape, work = find_shape(model), Workload.of(options, row_tokens)
    planned: list[Planned] = []
    for gpu in here or map(parse_card, COMMON):
        try:
            planned.append(Planned(gpu, make_plan(model, shape, gpu, work, known[layout])))
        except ConfigError as error:
            planned.append(Planned(gpu, None, str(error)))
    return planned
