"""retry, limit_concurrency, iterate_dataset."""

from __future__ import annotations

import asyncio

import pytest

import offbook
from offbook.base.errors import ConfigError


async def test_an_async_function_is_tried_again_and_told_of_each_failure_but_the_last() -> None:
    told: list[tuple[str, int]] = []
    tries = 0

    @offbook.retry(max_attempts=3, delay=0, exceptions=ValueError, on_retry=lambda e, n: told.append((str(e), n)))
    async def flaky(goal: int) -> str:
        nonlocal tries
        tries += 1
        if tries < goal:
            raise ValueError(f"try {tries}")
        return "done"

    assert await flaky(3) == "done"
    assert told == [("try 1", 1), ("try 2", 2)]
    tries = 0
    with pytest.raises(ValueError, match="try 3"):
        await flaky(9)
    assert tries == 3


def test_a_sync_function_is_tried_again_and_other_errors_are_not() -> None:
    tries: list[int] = []

    @offbook.retry(delay=0, exceptions=(ValueError,))
    def flaky() -> None:
        tries.append(1)
        raise (ValueError if len(tries) < 2 else KeyError)("x")

    with pytest.raises(KeyError):
        flaky()
    assert len(tries) == 2


async def test_a_cancellation_is_never_retried() -> None:
    tries = 0

    @offbook.retry(delay=0, exceptions=BaseException)
    async def cancelled() -> None:
        nonlocal tries
        tries += 1
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await cancelled()
    assert tries == 1


def test_concurrency_is_limited_per_key_and_in_each_event_loop() -> None:
    running: dict[str, int] = {}
    most: dict[str, int] = {}

    @offbook.limit_concurrency(2, derive_key=lambda key: key)
    async def work(key: str) -> None:
        running[key] = running.get(key, 0) + 1
        most[key] = max(most.get(key, 0), running[key])
        for _ in range(3):
            await asyncio.sleep(0)
        running[key] -= 1

    async def many() -> None:
        await asyncio.gather(*(work(key) for key in "aaaabbbb"))

    asyncio.run(many())
    asyncio.run(many())
    assert most == {"a": 2, "b": 2}


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: offbook.retry(max_attempts=0),
        lambda: offbook.limit_concurrency(0),
        lambda: list(offbook.iterate_dataset([])),
        lambda: list(offbook.iterate_dataset([1], groups_per_step=0)),
    ],
)
def test_options_out_of_range_are_refused_by_name(make: object) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|empty"):
        make()  # type: ignore[operator]
