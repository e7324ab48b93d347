"""Rows of Hugging Face datasets without the nulls that Arrow adds.

In a column of nested objects each object gets the keys of all others, with None: a list of two tools gives each the
arguments of the other. JSON has no such keys, and chat templates print them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

Item = TypeVar("Item")


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
