"""Iterates over a list of scenarios in steps and epochs."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from offbook.base.errors import ConfigError
from offbook.base.option_names import names_checked
from offbook.base.user_values import as_list

from .arrow_rows import UnpaddedRows, unpadded

Item = TypeVar("Item")


@dataclass(frozen=True)
class DatasetBatch(Generic[Item]):
    """The items of one step. `step` counts over all epochs, `epoch_step` within the epoch; both start at 0."""

    items: list[Item]
    step: int
    epoch: int
    epoch_step: int


@names_checked("iterate_dataset")
def iterate_dataset(
    dataset: Iterable[Item],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    *,
    shuffle: bool = True,
    seed: int = 0,
) -> Generator[DatasetBatch[Item]]:
    """Yield batches of `groups_per_step` items; the last batch of an epoch may be smaller.

    With `shuffle`, the order of an epoch depends on `seed` and the epoch only. `initial_step=await model.get_step()`
    resumes after the steps already trained. Raises ConfigError for an empty dataset or a number out of range.
    """
    if groups_per_step < 1 or num_epochs < 1 or initial_step < 0:
        raise ConfigError(
            "iterate_dataset: groups_per_step and num_epochs must be at least 1, initial_step at least 0; got "
            f"{groups_per_step!r}, {num_epochs!r}, {initial_step!r}"
        )
    rows = unpadded(dataset)
    items = rows if isinstance(rows, UnpaddedRows) else as_list(rows, "iterate_dataset", "item")
    if not items:
        raise ConfigError("iterate_dataset: the dataset is empty")
    per_epoch = -(-len(items) // groups_per_step)
    for epoch in range(initial_step // per_epoch, num_epochs):
        order = list(range(len(items)))
        if shuffle:
            random.Random(f"{seed}-{epoch}").shuffle(order)
        for epoch_step in range(per_epoch):
            step = epoch * per_epoch + epoch_step
            if step >= initial_step:
                chosen = order[epoch_step * groups_per_step : (epoch_step + 1) * groups_per_step]
                yield DatasetBatch([items[i] for i in chosen], step, epoch, epoch_step)
