"""Requests that name very much: bounded, so that nobody else waits for them."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook.base.wire import FINISHED_AT_ONCE, GROUPS_AT_ONCE, TrajectoryRecord
from offbook.client.connection.http import _batches  # pyright: ignore[reportPrivateUsage]
from offbook.server.http.json_body import MAX_OTHER_BYTES
from tests.fakes.gateway import Gateway, gateway_over
from tests.fakes.scripted_sampler import scripted_sampler

TYPED = {"content-type": "application/json"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as made:
        yield made


def finishes(count: int) -> bytes:
    record: dict[str, Any] = {"model": "default", "reward": 1.0, "started_at": 1.0, "ended_at": 2.0}
    return json.dumps({"trajectories": [record | {"id": f"t-{at}"} for at in range(count)]}).encode()


def groups(count: int) -> bytes:
    return json.dumps({"model": "default", "groups": [{"trajectory_ids": ["a"]}] * count}).encode()


STATE = json.dumps({"value": {"notes": ["x" * 100] * 300_000}}).encode()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/api/trajectories", finishes(10_000), 400),
        ("POST", "/api/trajectories", finishes(100_000), 400),
        ("PUT", "/api/models/default/state", STATE, 413),
        ("POST", "/api/train", groups(500_000), 413),
        ("POST", "/api/train", groups(GROUPS_AT_ONCE + 1), 400),
    ],
    ids=["10,000 trajectories", "100,000 trajectories", "30 MB of state", "500,000 groups", "10,001 groups"],
)
async def test_what_would_starve_others_is_refused_with_its_limit(
    gateway: Gateway, method: str, path: str, body: bytes, status: int
) -> None:
    answer = await gateway.http.request(method, path, content=body, headers=TYPED)
    assert answer.status_code == status, answer.text[:300]
    assert "at most" in answer.text and len(answer.text) < 2_000


@pytest.fixture
def own_garbage() -> Iterator[None]:
    """Collections walk what the test makes, and not what this process kept from hundreds of other tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def test_the_largest_requests_that_are_taken_keep_nobody_waiting(gateway: Gateway, own_garbage: None) -> None:
    busy: list[float] = []  # the loop's own processor time from tick to tick: that of the machine is no measure here

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.005)
            busy.append(time.thread_time() - before)

    state = json.dumps({"value": {"notes": ["x" * 100] * (MAX_OTHER_BYTES // 110)}}).encode()
    finished, asked = finishes(FINISHED_AT_ONCE), groups(GROUPS_AT_ONCE)
    watching = asyncio.create_task(watch())
    try:
        for _ in range(3):
            done = await gateway.http.post("/api/trajectories", content=finished, headers=TYPED)
            assert done.status_code == 200
            kept = await gateway.http.put("/api/models/default/state", content=state, headers=TYPED)
            assert kept.status_code == 200
            refused = await gateway.http.post("/api/train", content=asked, headers=TYPED)
            assert refused.status_code == 409  # nothing learns here
    finally:
        watching.cancel()
    assert max(busy) < 0.5  # it holds the client too


async def test_finishing_takes_few_statements_however_many_trajectories_there_are(gateway: Gateway) -> None:
    began = time.perf_counter()
    answer = await gateway.http.post("/api/trajectories", content=finishes(FINISHED_AT_ONCE), headers=TYPED)
    assert answer.json()["calls"]["t-999"] == 0
    assert time.perf_counter() - began < 5


def test_a_client_finishes_in_batches_that_the_server_takes() -> None:
    records = [TrajectoryRecord(id=f"t-{at}", model="m", started_at=1, ended_at=2) for at in range(2_500)]
    assert [len(batch) for batch in _batches(records)] == [1_000, 1_000, 500]
