"""Which scenarios an iteration takes, and how a set is split: functions of a seed, so that a resumed run goes on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

from offbook.base.errors import ConfigError
from offbook.base.user_values import as_list

from .identity import scenario_id

T = TypeVar("T")


def batch(scenarios: Sequence[T], size: int, iteration: int, seed: int) -> list[T]:
    """The scenarios of iteration 0, 1, ...: all of them in a shuffled order, then all in another one. A batch larger
    than the set is the whole set."""
    count = len(scenarios)
    size = min(size, count)
    picked: list[T] = []
    taken: set[int] = set()
    place = iteration * size
    while len(picked) < size:
        epoch, offset = divmod(place, count)
        index = _order(count, epoch, seed)[offset]
        if index not in taken:  # a batch over the border of two epochs holds nothing twice
            taken.add(index)
            picked.append(scenarios[index])
        place += 1
    return picked


def split(scenarios: Iterable[T], share: float, seed: int = 0) -> tuple[list[T], list[T]]:
    """Return (train, held out). About `share` of the scenarios is held out; the id alone decides for each."""
    if not 0 < share < 1:
        raise ConfigError(f"share: a fraction between 0 and 1 is needed, got {share!r}")
    kept: list[T] = []
    held_out: list[T] = []
    for scenario in as_list(scenarios, "scenarios"):
        digest = hashlib.sha256(f"{seed} {scenario_id(scenario)}".encode()).digest()
        (held_out if int.from_bytes(digest[:8]) < share * 2**64 else kept).append(scenario)
    return kept, held_out


def _order(count: int, epoch: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order
