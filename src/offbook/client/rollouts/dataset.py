"""Iterates over a list of scenarios in steps and epochs; reads rows of Hugging Face datasets without Arrow's padding.

In an Arrow column of nested objects each object gets the keys of all others, with None: a list of two tools gives each the
arguments of the other. JSON has no such keys, and chat templates print them.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from offbook.base.errors import ConfigError
from offbook.base.option_names import names_checked
from offbook.base.user_values import as_list

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

    With `shuffle`, the order depends only on `seed` and the epoch. `initial_step=await model.get_step()`
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


class UnpaddedRows(Sequence[dict[str, object]]):
    """The rows of a `datasets.Dataset`, read when they are asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return unpadded_row(self._dataset[index], self._dataset.features)


def unpadded(rows: Iterable[Item]) -> Iterable[Item]:
    """`rows` itself, or the rows of a Hugging Face dataset without Arrow's padding. A Dataset stays a sequence."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(rows).__mro__}  # `datasets` is an extra
    if "datasets.arrow_dataset.Dataset" in kinds:
        return cast(Iterable[Item], UnpaddedRows(rows))
    if "datasets.iterable_dataset.IterableDataset" in kinds:
        return cast(Iterable[Item], _streamed(rows))
    return rows


def _streamed(dataset: Any) -> Generator[dict[str, object]]:
    for row in dataset:
        yield unpadded_row(row, dataset.features)


def unpadded_row(row: Mapping[str, object], features: Mapping[str, Any] | None) -> dict[str, object]:
    """The row with its own None, but without those inside its values. `features`: the dataset's; None: unknown."""
    if features is None:
        return {name: _unpadded(value) for name, value in row.items()}
    return {name: _unpadded(value, features[name]) if name in features else value for name, value in row.items()}


def _unpadded(value: object, feature: Any = None) -> object:
    """Without the None keys of objects that are Arrow structs. Those of a `Json` feature are the user's."""
    if isinstance(value, dict) and (feature is None or isinstance(feature, dict)):
        fields = cast(dict[str, Any], feature or {})
        items = cast(dict[str, object], value).items()
        return {key: _unpadded(item, fields.get(key)) for key, item in items if item is not None}
    if isinstance(value, list):
        inner: Any = cast(list[Any], feature)[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if feature is None or inner is not None:
            return [_unpadded(item, inner) for item in cast(list[object], value)]
    return cast(object, value)
