"""`art.retry` and `art.limit_concurrency`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import offbook
from offbook.base.errors import ConfigError
from offbook_art.utils import limit_concurrency, retry  # type: ignore[import-not-found]


async def test_an_async_function_is_tried_again_and_told_of_each_failure_but_the_last() -> None:
    told: list[tuple[str, int]] = []
    tries = 0

    @retry(max_attempts=3, delay=0, exceptions=ValueError, on_retry=lambda e, n: told.append((str(e), n)))
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

    @retry(delay=0, exceptions=(ValueError,))
    def flaky() -> None:
        tries.append(1)
        raise (ValueError if len(tries) < 2 else KeyError)("x")

    with pytest.raises(KeyError):
        flaky()
    assert len(tries) == 2


async def test_a_cancellation_is_never_retried() -> None:
    tries = 0

    @retry(delay=0, exceptions=BaseException)
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

    @limit_concurrency(2, derive_key=lambda key: key)
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


@pytest.mark.parametrize("make", [lambda: retry(max_attempts=0), lambda: limit_concurrency(0)])
def test_options_out_of_range_are_refused_by_name(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make()


@pytest.mark.parametrize("name", ["retry", "limit_concurrency"])
def test_they_are_where_users_of_art_import_them_and_no_public_name_of_ours(name: str) -> None:
    found: dict[str, object] = {}
    exec(f"import offbook_art as art; top = art.{name}; from offbook_art import {name} as named", found)
    exec(f"from offbook_art.utils import {name} as utils", found)
    exec(f"from offbook_art.utils.{name} import {name} as own", found)
    assert found["top"] is found["named"] is found["utils"] is found["own"]
    assert name not in offbook.__all__
