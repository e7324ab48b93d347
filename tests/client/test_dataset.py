"""iterate_dataset."""

from __future__ import annotations

from typing import Any

import pytest

import offbook
from offbook.base.errors import ConfigError


def test_a_dataset_is_walked_in_epochs_and_resumed_at_a_step() -> None:
    batches = list(offbook.iterate_dataset(list(range(5)), groups_per_step=2, num_epochs=2))
    assert [(b.step, b.epoch, b.epoch_step, len(b.items)) for b in batches] == [
        (0, 0, 0, 2),
        (1, 0, 1, 2),
        (2, 0, 2, 1),
        (3, 1, 0, 2),
        (4, 1, 1, 2),
        (5, 1, 2, 1),
    ]
    for epoch in (0, 1):
        assert sorted(item for b in batches if b.epoch == epoch for item in b.items) == list(range(5))
    assert [b.items for b in batches if b.epoch == 0] != [b.items for b in batches if b.epoch == 1]
    assert list(offbook.iterate_dataset(list(range(5)), 2, 2, initial_step=4)) == batches[4:]
    assert [b.items for b in offbook.iterate_dataset(list("abc"), 2, shuffle=False)] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(("items", "options"), [([], {}), ([1], {"groups_per_step": 0})])
def test_options_out_of_range_are_refused_by_name(items: list[int], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|empty"):
        list(offbook.iterate_dataset(items, **options))
