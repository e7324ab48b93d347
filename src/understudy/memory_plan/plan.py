"""The plan: which layout fits, with how large rows, and what to change where none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..config import MemoryLayout
from ..errors import ConfigError
from .base_shape import BaseShape
from .card import GIB, Card, parse_card
from .layout import LAYOUTS, host_bytes, peak_bytes, sampling_parts, step_parts
from .parts import CALL_TOKENS, Parts, Workload, cache_per_token, parts

LEAST_ROW = 2048
"""Rows of fewer tokens would hold hardly a call: nothing is planned with them."""
ROW_UNIT = 1024
ENOUGH_ROWS = 0.5
"""Of the row size asked for. Smaller rows compute more of the shared tokens again."""
ENOUGH_CALLS = 32
"""Calls that the cache should hold at once, for vLLM to decode them together."""
CARDS = ("16GB", "24GB", "32GB", "40GB", "48GB", "80GB", "141GB", "192GB")
"""Sizes that are sold or rented."""


@dataclass(frozen=True)
class MemoryPlan:
    """A layout that fits. `row_tokens` is the largest row, at most the one asked for; `cache_tokens` what the key-value
    cache can hold beside everything else."""

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
        """Bytes on the GPU while calls are answered, with the least cache."""
        return sum(sampling_parts(self.layout, self.parts).values())

    @property
    def step(self) -> int:
        """Bytes on the GPU at the peak of a step."""
        return sum(step_parts(self.layout, self.parts).values())

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return host_bytes(self.layout, self.parts)

    @property
    def learner_peak(self) -> int:
        """What the learner's tensors come to at the peak of a step."""
        return self.parts.learner_state + self.parts.learner_gradients + self.parts.learner_activations

    @property
    def cache_calls(self) -> int:
        """Calls of CALL_TOKENS that the cache has room for."""
        return self.cache_tokens // min(CALL_TOKENS, self.work.longest(self.shape))


def make_plan(
    base: str, shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"] = "auto"
) -> MemoryPlan:
    """The layout `wanted`. `auto`: the quickest with rows and a cache that are large enough, else the one with the
    largest rows. Raises ConfigError that names the setting to change."""
    made = _fitting(base, shape, card, work, wanted)
    if made is None:
        raise ConfigError(_refusal(base, shape, card, work, wanted))
    return made


def _fitting(
    base: str, shape: BaseShape, card: Card, work: Workload, wanted: MemoryLayout | Literal["auto"]
) -> MemoryPlan | None:
    best: MemoryPlan | None = None
    for layout in LAYOUTS if wanted == "auto" else (wanted,):
        rows = _largest_rows(shape, card, work, layout)
        if rows is None:
            continue
        held = parts(shape, card, work, rows)
        room = card.memory - sum(sampling_parts(layout, held).values()) + held.cache
        made = MemoryPlan(base, shape, card, work, layout, rows, held, room // cache_per_token(shape, work))
        if rows >= work.row_tokens * ENOUGH_ROWS and made.cache_calls >= min(
            ENOUGH_CALLS, work.max_batch or ENOUGH_CALLS
        ):
            return made
        if best is None or (rows, made.cache_tokens) > (best.row_tokens, best.cache_tokens):
            best = made
    return best


def _largest_rows(shape: BaseShape, card: Card, work: Workload, layout: MemoryLayout) -> int | None:
    """Rows of the size asked for, or as many whole units below it as fit; None where not the least do."""
    below = range(work.row_tokens // ROW_UNIT * ROW_UNIT, min(LEAST_ROW, work.row_tokens) - 1, -ROW_UNIT)
    for rows in (work.row_tokens, *below):
        if peak_bytes(layout, parts(shape, card, work, rows)) <= card.memory:
            return rows
    return None


def _changes(
    shape: BaseShape, work: Workload, wanted: MemoryLayout | Literal["auto"]
) -> Iterator[tuple[str, Workload, MemoryLayout | Literal["auto"]]]:
    """Settings to change, the one that costs least first."""
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
    """The setting under which it fits; a larger card, or a smaller base, where no setting does."""
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
    phase, needed = ("sampling", sampling) if sampling >= step else (f"a step with rows of {rows:,} tokens", step)
    return (
        f"{base} does not fit on {card.name} with memory layout {layout}: {phase} needs {needed / GIB:.1f} of "
        f"{card.memory / GIB:.1f} GiB. Take {remedy(shape, card, work, wanted)}"
    )
