"""The plan for several equal GPUs: replicas of the sampler on some, a team of learners on the others.

Each side has its GPUs for itself, so nothing sleeps or moves during a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from offbook.base.errors import ConfigError
from offbook.base.text import counted

from .base_shape import BaseShape
from .card import GIB, Card, parse_card
from .parts import (
    CALL_TOKENS,
    CONTEXT,
    RESERVE,
    Parts,
    Workload,
    cache,
    cache_per_token,
    parts,
    sharded_weights,
)
from .plan import CARDS, ENOUGH_CALLS, LEAST_ROW, row_sizes

OWN_SHARE = 0.92
"""vLLM 0.32's default of --gpu-memory-utilization, its share of a GPU of its own (`config/cache.py`)."""
LEARNER_SHARE = 4
"""One of so many GPUs trains, and at least one. A rule of thumb: rollouts mostly take longer than steps."""
MOST_CARDS = 64
_CARDS = re.compile(r"(\d{1,3})\s*[xX]\s*(\S.*)")


@dataclass(frozen=True)
class CardsPlan:
    """A division of `count` cards that fits. `replica` and `learner`: part -> bytes on each of their cards, with the smallest
    cache and the largest row. `cache_tokens`: what fits into the cache of a replica. `shard`: the learners shard the base."""

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
    shard: bool = False

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
        trains = f" --train-gpus {training}{' --shard' if self.shard else ''}" if training else ""
        return f"--inference-gpus {sampling}{split}{trains}"


def parse_cards(text: str) -> tuple[int, Card]:
    """Parse a number of equal cards. Raises ConfigError for other text.

    >>> count, card = parse_cards("8x80GB")
    >>> count, card.memory
    (8, 80000000000)
    """
    match = _CARDS.fullmatch(text.strip())
    if match is None or not 1 <= int(match[1]) <= MOST_CARDS:
        raise ConfigError(f"--cards {text!r}: give a number up to {MOST_CARDS} and a GPU's memory, such as 8x80GB")
    return int(match[1]), parse_card(match[2])


def plan_cards(
    base: str, shape: BaseShape, card: Card, count: int, work: Workload, *, trains: bool = True
) -> CardsPlan:
    """Divide two or more cards: the smallest replicas with a large enough cache, and a learner on one card in
    LEARNER_SHARE. Cards that make no whole replica train too. Learners that cannot hold the whole base shard it, if there are
    enough. `trains`: False gives all to replicas.

    Raises ConfigError that says what is missing."""
    plan = _divided(base, shape, card, count, work, trains=trains)
    if isinstance(plan, str):
        change = cards_remedy(shape, card, count, work, trains=trains)
        raise ConfigError(f"{base} does not fit on {count} cards of {card.name}: {plan}. Take {change}")
    return plan


def cards_remedy(shape: BaseShape, card: Card, count: int, work: Workload, *, trains: bool = True) -> str:
    """The cheapest change with which the base fits: a setting, more cards, larger ones, or a smaller base."""
    for setting, other, cards, number in _changes(card, count, work):
        if not isinstance(_divided("", shape, cards, number, other, trains=trains), str):
            return setting
    return "a smaller --model"


def _changes(card: Card, count: int, work: Workload) -> Iterator[tuple[str, Workload, Card, int]]:
    settings = [("", work)]
    if work.max_batch is None:
        settings.append(("--max-batch 32", replace(work, max_batch=32)))
    if not work.four_bit:
        settings += [(f"--load-in-4bit {words}".strip(), replace(other, four_bit=True)) for words, other in settings]
    yield from ((words, other, card, count) for words, other in settings[1:])
    for number in (2, 4, 8):
        if number > count:
            yield from ((f"{number}x{card.name} {words}".strip(), other, card, number) for words, other in settings)
    for text in CARDS:
        if (larger := parse_card(text)).memory > card.memory:
            yield from ((f"{count}x{text} {words}".strip(), other, larger, count) for words, other in settings)


def _divided(base: str, shape: BaseShape, card: Card, count: int, work: Workload, *, trains: bool) -> CardsPlan | str:
    """The plan of `plan_cards`, or what is missing."""
    if count < 2:
        return "two cards or more are divided"
    least = parts(shape, card, work, min(LEAST_ROW, work.row_tokens))
    holding = _least_learners(shape, card, work, count) if trains else 0
    if isinstance(holding, str):
        return holding
    sampling = _replica(shape, card, work, least, count - holding)
    if sampling is None:
        needed = sum(_replica_parts(shape, work, least, 1).values())
        room = OWN_SHARE * card.usable
        shards = f" beside {holding} learners that shard the base" if holding > 1 else ""
        return (
            f"a replica needs {needed / GIB:.1f} GiB in all, and vLLM takes {room / GIB:.1f} of each of the "
            f"{counted(count - holding, 'card')} that may sample{shards}"
        )
    split, held, tokens = sampling
    replicas = max(1, (count - max(holding, count // LEARNER_SHARE * trains)) // split)
    learners = count - replicas * split if trains else 0
    rows, learner = work.row_tokens, dict[str, int]()
    if trains:
        largest = _learner(shape, card, work, learners if holding > 1 else 1)
        assert largest is not None, "more learners hold less each"
        rows, learner = largest
    return CardsPlan(base, card, count, split, replicas, learners, rows, tokens, held, learner, holding > 1)


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


def _least_learners(shape: BaseShape, card: Card, work: Workload, count: int) -> int | str:
    """How few learners hold the base: one whole, or more that shard it and leave a card for a replica. Or what is missing."""
    for learners in range(1, 2 if work.four_bit else max(2, count)):
        if _learner(shape, card, work, learners) is not None:
            return learners
    rows, most = min(LEAST_ROW, work.row_tokens), count - 1
    needed = sum(_learner_parts(shape, card, work, rows, 1).values())
    missing = f"a learner needs {needed / GIB:.1f} GiB for the whole base and rows of {rows:,} tokens"
    if most > 1 and not work.four_bit:
        sharded = sum(_learner_parts(shape, card, work, rows, most).values())
        missing += f", or {sharded / GIB:.1f} where {most} shard the base"
    return f"{missing}, and a card has {card.usable / GIB:.1f}"


def _learner(shape: BaseShape, card: Card, work: Workload, learners: int) -> tuple[int, dict[str, int]] | None:
    """The largest row of a learner that holds the whole base, or with more `learners` its part, and what it holds then; None
    if no row fits."""
    for rows in row_sizes(work.row_tokens):
        held = _learner_parts(shape, card, work, rows, learners)
        if sum(held.values()) <= card.usable:
            return rows, held
    return None


def _learner_parts(shape: BaseShape, card: Card, work: Workload, rows: int, learners: int) -> dict[str, int]:
    held = parts(shape, card, work, rows)
    names = ("learner_weights", "learner_adapter", "learner_optimizer", "learner_gradients", "learner_activations")
    whole = {name: getattr(held, name) for name in names} | {"contexts": CONTEXT + RESERVE}
    return whole if learners == 1 else whole | {"learner_weights": sharded_weights(shape, work, learners)}
