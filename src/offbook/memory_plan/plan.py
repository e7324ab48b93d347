"""The memory plan: which layout fits, with how large rows, and what to change if none does; for one GPU, or for several equal ones:
replicas of the sampler on some, a team of learners on the others, so that nothing sleeps or moves during a step. As text and JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from offbook.base.errors import ConfigError
from offbook.base.server_options import MemoryLayout
from offbook.base.text import counted
from offbook.base.types import Json

from .parts import (
    CALL_TOKENS,
    CONTEXT,
    GIB,
    LAYOUTS,
    MIN_CALLS,
    PROCESSES,
    RESERVE,
    BaseShape,
    Card,
    Parts,
    Workload,
    cache,
    cache_per_token,
    host_bytes,
    learner_activations,
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
        return host_bytes(self.layout, self.parts)

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


OWN_SHARE = 0.92
"""vLLM 0.32's default of --gpu-memory-utilization, its share of a GPU of its own (`config/cache.py`)."""
LEARNER_SHARE = 4
"""One of so many GPUs trains, and at least one. A rule of thumb: rollouts mostly take longer than steps."""
MAX_CARDS = 64
_CARDS = re.compile(r"(\d{1,3})\s*[xX]\s*(\S.*)")


@dataclass(frozen=True)
class CardsPlan:
    """A division of `count` cards that fits. `replica` and `learner`: part -> bytes on each of their cards, with the smallest
    cache and the largest row. `cache_tokens`: what fits into the cache of a replica."""

    base: str
    card: Card
    count: int
    tensor_parallel: int
    replicas: int
    learners: int
    row_tokens: int
    cache_tokens: int
    replica: dict[str, int]
    learner: dict[str, int]

    @property
    def cache_calls(self) -> int:
        """Number of calls of CALL_TOKENS that the cache of a replica holds."""
        return self.cache_tokens // CALL_TOKENS

    def gpus(self, indices: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The GPUs of the sampler and those of the learners. `indices`: of the cards, if not 0, 1, 2, ..."""
        indices = indices or tuple(range(self.count))
        sampling = self.replicas * self.tensor_parallel
        return indices[:sampling], indices[sampling : sampling + self.learners]

    def options(self) -> str:
        """The options of `offbook serve` that divide the cards so."""
        sampling, training = (",".join(map(str, gpus)) for gpus in self.gpus())
        split = f" --tensor-parallel {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        trains = f" --train-gpus {training}" if training else ""
        return f"--inference-gpus {sampling}{split}{trains}"


def parse_cards(text: str) -> tuple[int, Card]:
    """Parse a number of equal cards. Raises ConfigError for other text.

    >>> count, card = parse_cards("8x80GB")
    >>> count, card.memory
    (8, 80000000000)
    """
    match = _CARDS.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= MAX_CARDS:
        raise ConfigError(f"--cards {text!r}: give a number up to {MAX_CARDS} and a GPU's memory, such as 8x80GB")
    return int(match[1]), parse_card(match[2])


def plan_cards(
    base: str, shape: BaseShape, card: Card, count: int, work: Workload, *, trains: bool = True
) -> CardsPlan:
    """Divide two or more cards: the smallest replicas with a large enough cache, and a learner on one card in
    LEARNER_SHARE. Cards that make no whole replica train too. `trains`: False gives all to replicas.

    Raises ConfigError that says what is missing."""
    plan = _divided(base, shape, card, count, work, trains=trains)
    if isinstance(plan, str):
        change = cards_remedy(shape, card, count, work, trains=trains)
        raise ConfigError(f"{base} does not fit on {count} cards of {card.name}: {plan}. Take {change}")
    return plan


def cards_remedy(shape: BaseShape, card: Card, count: int, work: Workload, *, trains: bool = True) -> str:
    """The cheapest change with which the base fits: a setting, more cards, larger ones, or a smaller base."""
    others = [(f"{number}x{card.name}", card, number) for number in (2, 4, 8) if number > count]
    larger = [parse_card(text) for text in CARDS]
    others += [(f"{count}x{one.name}", one, count) for one in larger if one.memory > card.memory]
    for cards, one, number in (("", card, count), *others):
        for setting, changed in (("", work), *_settings(work)):
            if not isinstance(_divided("", shape, one, number, changed, trains=trains), str):
                return f"{cards} {setting}".strip()
    return "a smaller --model"


def _divided(base: str, shape: BaseShape, card: Card, count: int, work: Workload, *, trains: bool) -> CardsPlan | str:
    """The plan of `plan_cards`, or what is missing."""
    if count < 2:
        return "two cards or more are divided"
    least = parts(shape, card, work, min(MIN_ROW, work.row_tokens))
    learner = _learner(shape, card, work) if trains else (work.row_tokens, dict[str, int]())
    if learner is None:
        rows = min(MIN_ROW, work.row_tokens)
        needed = sum(_learner_parts(shape, card, work, rows).values())
        return (
            f"a learner needs {needed / GIB:.1f} GiB for the whole base and rows of {rows:,} tokens, and a card has "
            f"{card.usable / GIB:.1f}"
        )
    sampling = _replica(shape, card, work, least, count - trains)
    if sampling is None:
        needed = sum(_replica_parts(shape, work, least, 1).values())
        room = OWN_SHARE * card.usable
        return (
            f"a replica needs {needed / GIB:.1f} GiB in all, and vLLM takes {room / GIB:.1f} of each of the "
            f"{counted(count - trains, 'card')} that may sample"
        )
    split, held, tokens = sampling
    replicas = max(1, (count - max(1, count // LEARNER_SHARE) * trains) // split)
    learners = count - replicas * split if trains else 0
    return CardsPlan(base, card, count, split, replicas, learners, learner[0], tokens, held, learner[1])


def _replica(
    shape: BaseShape, card: Card, work: Workload, least: Parts, most: int
) -> tuple[int, dict[str, int], int] | None:
    """GPUs of a replica, its parts on each, and its cache in tokens: on as few as hold the wanted calls, else as many as the
    heads can be split over. None if it does not fit on `most`."""
    best: tuple[int, dict[str, int], int] | None = None
    for split in splits(shape, most):
        held = _replica_parts(shape, work, least, split)
        room = int(OWN_SHARE * card.usable) - sum(held.values())
        if room < 0:
            continue
        tokens = (room + held["cache"]) * min(split, shape.kv_heads) // cache_per_token(shape, work)
        best = (split, held, tokens)
        if tokens // CALL_TOKENS >= min(ENOUGH_CALLS, work.max_batch or ENOUGH_CALLS):
            break
    return best


def splits(shape: BaseShape, most: int) -> Iterator[int]:
    """Powers of two up to `most` over which vLLM can split the base: they divide its heads, and its key-value heads or are
    multiples of them."""
    split = 1
    while split <= most:
        if shape.heads % split == 0 and 0 in (shape.kv_heads % split, split % shape.kv_heads):
            yield split
        split *= 2


def _replica_parts(shape: BaseShape, work: Workload, least: Parts, split: int) -> dict[str, int]:
    """Bytes on each of the `split` cards of a replica. Weights and cache are split; LoRA slots and activations are counted
    whole, since vLLM keeps one of a LoRA's two matrices and the logits whole."""
    return {
        "sampler_weights": -(-least.sampler_weights // split),
        "sampler_adapters": least.sampler_adapters,
        "sampler_activations": least.sampler_activations,
        "cuda_graphs": least.cuda_graphs,
        "cache": -(-cache(shape, work) // min(split, shape.kv_heads)),
        "contexts": CONTEXT,
    }


def _learner(shape: BaseShape, card: Card, work: Workload) -> tuple[int, dict[str, int]] | None:
    """The largest row of a learner on a card of its own, and its parts then; None if no row fits."""
    for rows in row_sizes(work.row_tokens):
        held = _learner_parts(shape, card, work, rows)
        if sum(held.values()) <= card.usable:
            return rows, held
    return None


def _learner_parts(shape: BaseShape, card: Card, work: Workload, rows: int) -> dict[str, int]:
    held = parts(shape, card, work, rows)
    names = ("learner_weights", "learner_adapter", "learner_optimizer", "learner_gradients", "learner_activations")
    return {name: getattr(held, name) for name in names} | {"contexts": CONTEXT + RESERVE}


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
        lines.append(
            f"  {counted(plan.learners, 'learner')}, each with the whole base: rows of at most {plan.row_tokens:,} tokens"
        )
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
        "row_tokens": plan.row_tokens,
        "cache_tokens": plan.cache_tokens,
        "options": plan.options(),
        REPLICA: plan.replica,
        LEARNER: plan.learner,
    }


def _gib(count: int | None) -> str:
    return f"{count / GIB:8.2f}" if count is not None else f"{'-':>8}"
