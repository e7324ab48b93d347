"""The memory plan: which layout fits, with how large rows, and what to change if none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from offbook.base.errors import ConfigError
from offbook.base.server_options import MemoryLayout

from .base_shape import BaseShape
from .card import GIB, Card, parse_card
from .host import host_bytes
from .layout import LAYOUTS, peak_bytes, sampling_parts, step_parts
from .parts import CALL_TOKENS, LEAST_CALLS, Parts, Workload, cache_per_token, learner_activations, parts

LEAST_ROW = 2048
"""Smallest row in tokens that is planned. Smaller rows could hold few calls."""
LARGEST_ROW = 131_072
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
WELL_CACHED = 256
"""Number of calls that the cache holds, where `--max-batch` is not set, before rows get memory to keep their activations:
a step's rollouts are seldom more at once."""
CARDS = ("16GB", "24GB", "32GB", "40GB", "48GB", "80GB", "141GB", "192GB")
"""Common sizes of GPUs, smallest first."""


@dataclass(frozen=True)
class MemoryPlan:
    """A layout that fits. `row_tokens` is the largest row, at most the wanted one. `cache_tokens` is the key-value
    cache that fits beside all other parts. `unrecomputed_tokens`: the largest row that fits without activation
    recomputation, which costs a third more compute; 0: none."""

    base: str
    shape: BaseShape
    card: Card
    work: Workload
    layout: MemoryLayout
    row_tokens: int
    parts: Parts
    cache_tokens: int
    unrecomputed_tokens: int = 0

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
        return host_bytes(self.layout, self.shape, self.work)

    @property
    def learner_peak(self) -> int:
        """Bytes of the learner's tensors at the peak of a step."""
        return self.parts.learner_state + self.parts.learner_gradients + self.parts.learner_activations

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
            self.card.decoded_calls, max(LEAST_CALLS, self.cache_tokens // SHORT_CALL_TOKENS)
        )

    @property
    def row_limit(self) -> int:
        """The largest row in tokens that fits, whatever the train config says."""
        if self.layout == "side_by_side":
            return self.row_tokens  # the cache fills the rest of the GPU
        largest = replace(self.work, row_tokens=max(self.work.row_tokens, LARGEST_ROW))
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
    return _with_kept_activations(plan)


def _with_kept_activations(plan: MemoryPlan) -> MemoryPlan:
    """The plan with rows that keep their activations, as large as the free memory allows.

    Free is what a step leaves; side by side, the cache beyond that of WELL_CACHED calls."""
    held, token = plan.parts, cache_per_token(plan.shape, plan.work)
    room = plan.card.usable - plan.step
    if plan.layout == "side_by_side":
        room = (plan.cache_tokens - (plan.work.max_batch or WELL_CACHED) * CALL_TOKENS) * token
    for rows in range(plan.row_tokens // ROW_UNIT * ROW_UNIT, 0, -ROW_UNIT):
        kept = learner_activations(plan.shape, plan.work, rows, recompute=False)
        more = max(kept - held.learner_activations, 0)
        if more <= max(room, 0):
            held = replace(held, learner_activations=held.learner_activations + more)
            cache = _cache_tokens(plan.shape, plan.card, plan.work, plan.layout, held)
            return replace(plan, parts=held, cache_tokens=cache, unrecomputed_tokens=rows)
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
    """Row sizes to try, in tokens, the largest first: the wanted one, and the multiples of ROW_UNIT below it down to LEAST_ROW.

    >>> row_sizes(3500)
    (3500, 3072, 2048)
    """
    return wanted, *range((wanted - 1) // ROW_UNIT * ROW_UNIT, min(LEAST_ROW, wanted) - 1, -ROW_UNIT)


def _changes(
    shape: BaseShape, work: Workload, wanted: MemoryLayout | Literal["auto"]
) -> Iterator[tuple[str, Workload, MemoryLayout | Literal["auto"]]]:
    """Yield settings to try, the cheapest first, with the workload and the layout that they lead to."""
    if wanted != "auto":
        yield "--memory-layout auto", work, "auto"
    for calls in _halves(work.max_batch, 1):
        yield f"--max-batch {calls}", replace(work, max_batch=calls), "auto"
    for length in _halves(work.max_model_len, CALL_TOKENS):
        yield f"--max-model-len {length}", replace(work, max_model_len=length), "auto"
    fewer = replace(work, max_batch=32)
    if work.max_batch is None:
        yield "--max-batch 32", fewer, "auto"
    if work.rank > 16:
        yield "--max-lora-rank 16", replace(work, rank=16), "auto"
    if not work.four_bit:
        yield "--load-in-4bit", replace(work, four_bit=True), "auto"
        if work.max_batch is None:
            yield "--load-in-4bit --max-batch 32", replace(fewer, four_bit=True), "auto"


def _halves(value: int | None, least: int) -> Iterator[int]:
    while value is not None and value // 2 >= least:
        value //= 2
        yield value


def remedy(shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"] = "auto") -> str:
    """The cheapest setting with which the base fits. If there is none: a larger card, or a smaller base."""
    if card.taken and _fitting("", shape, replace(card, taken=0), work, wanted) is not None:
        return f"the whole of {card.name}: end the other programs on it"
    for setting, other, layout in _changes(shape, work, wanted):
        if _fitting("", shape, card, other, layout) is not None:
            return setting
    for text in CARDS:
        larger = parse_card(text)
        if larger.memory > card.memory and _fitting("", shape, larger, work, "auto") is not None:
            return f"a GPU of {text}, or a smaller --model"
    return "a smaller --model"


def _refusal(base: str, shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"]) -> str:
    rows = min(LEAST_ROW, work.row_tokens)
    held = parts(shape, card, work, rows)
    layout = "offload" if wanted == "auto" else wanted
    sampling, step = (sum(held_in(layout, held).values()) for held_in in (sampling_parts, step_parts))
    others = f" ({card.taken / GIB:.1f} more are held by other programs)" if card.taken else ""
    phase, needed = ("sampling", sampling) if sampling >= step else (f"a step with rows of {rows:,} tokens", step)
    return (
        f"{base} does not fit on {card.name} with memory layout {layout}: {phase} needs {needed / GIB:.1f} of "
        f"{card.usable / GIB:.1f} GiB{others}. Take {remedy(shape, card, work, wanted)}"
    )
