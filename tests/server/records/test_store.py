"""What the records promise: durable when answered, claimed once, sealed once."""

from __future__ import annotations

import asyncio
import json
import math
import re
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from offbook.base.errors import StoreError
from offbook.base.types import (
    Call,
    CallOrigin,
    CallOutput,
    CallRef,
    CallStatus,
    Sampling,
    new_id,
)
from offbook.base.wire import (
    LogRequest,
    TrainStatus,
    TrajectoryQuery,
    TrajectoryRecord,
)
from offbook.server.errors import ApiError, StoreFullError
from offbook.server.records.database import ReadOnlyRecords, engine_at
from offbook.server.records.store import Store
from offbook.server.records.tables import metadata, trajectories
from tests.paths import ROOT


def a_call(trajectory_id: str = "traj-a", *, at: float = 100.0, choices: int = 1, status: str = "complete") -> Call:
    outputs = tuple(
        CallOutput(
            index=index,
            token_ids=(7, 2_000_000_000, index),
            logprobs=(-0.5, math.nan, -1.25),
            message={"role": "assistant", "content": f"é {index}"},
            finish_reason="stop",
        )
        for index in range(choices)
    )
    return Call(
        id=new_id("call"),
        trajectory_id=trajectory_id,
        model="default",
        step=3,
        status=CallStatus(status),
        sampling=Sampling(temperature=0.7),
        constrained="tool_choice",
        messages=({"role": "user", "content": "a\u0000b"},),
        tools=({"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}},),
        prompt_ids=(1, 2, 3),
        outputs=outputs,
        origin=CallOrigin(node="agent", tags=("x",)),
        started_at=at,
        ended_at=at + 1,
    )


def a_record(trajectory_id: str, calls: tuple[CallRef, ...] | None = None, **changed: object) -> TrajectoryRecord:
    fields = {"model": "default", "reward": 0.5, "started_at": 1.0, "ended_at": 2.0} | changed
    return TrajectoryRecord.model_validate({"id": trajectory_id, "calls": calls} | fields)


async def test_a_call_comes_back_as_it_was_recorded(store: Store) -> None:
    call = a_call(choices=2)
    assert await store.add_call(call) == call
    found = await store.calls_of(["traj-a", "nobody"])
    assert found == {"traj-a": (call,), "nobody": ()}
    assert list(found["traj-a"][0].tools[0]["function"]["parameters"]) == ["z", "a"]  # type: ignore[index]


async def test_calls_come_in_order_of_start(store: Store) -> None:
    later, earlier = a_call(at=50.0), a_call(at=20.0)
    await asyncio.gather(store.add_call(later), store.add_call(earlier))
    assert [call.id for call in (await store.calls_of(["traj-a"]))["traj-a"]] == [earlier.id, later.id]


async def test_a_repeated_idempotency_key_returns_the_stored_call_of_the_same_trajectory_only(store: Store) -> None:
    first, again, other = a_call(), a_call(), a_call("traj-b")
    results = await asyncio.gather(*(store.add_call(call, "key-1") for call in (first, again, other)))
    assert [result.id for result in results] == [first.id, first.id, other.id]
    assert (await store.add_call(a_call(), "key-1")).id == first.id
    assert await store.call_with_key("traj-a", "key-1") == first
    assert await store.call_with_key("traj-c", "key-1") is None


async def test_equal_calls_without_a_key_stay_apart(store: Store) -> None:
    for _ in range(3):
        await store.add_call(a_call())
    assert len((await store.calls_of(["traj-a"]))["traj-a"]) == 3


def test_on_sqlite_a_transaction_is_begun_before_its_first_statement(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "records.db", 5)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1  # the driver itself begins at the first INSERT
        assert connection.connection.driver_connection.in_transaction  # pyright: ignore
    engine.dispose()


def test_no_question_of_calls_reads_them_all(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "records.db", 5)
    with engine.connect() as connection:
        metadata.create_all(connection)
        for condition, index in (
            ("calls WHERE trajectory_id IN ('a', 'b')", "sqlite_autoindex_calls_2"),
            ("outputs WHERE claimed_by IN ('a', 'b')", "outputs_claimed"),
        ):
            (plan,) = connection.execute(sa.text(f"EXPLAIN QUERY PLAN SELECT * FROM {condition}"))
            assert re.search(rf"SEARCH \w+ USING INDEX ({index}) ", plan.detail), plan.detail
    engine.dispose()


async def test_finishing_seals_and_later_calls_are_late(store: Store) -> None:
    await store.add_call(a_call())
    assert await store.finish([a_record("traj-a")]) == {"traj-a": 1}
    await store.add_call(a_call(at=200.0))
    assert [call.late for call in (await store.calls_of(["traj-a"]))["traj-a"]] == [False, True]
    assert await store.finish([a_record("traj-a", reward=0.9)]) == {"traj-a": 1}
    assert [call.late for call in (await store.calls_of(["traj-a"]))["traj-a"]] == [False, True]
    assert (await store.finished(["traj-a", "x"])).keys() == {"traj-a"}
    assert (await store.finished(["traj-a"]))["traj-a"].reward == 0.9


async def test_choices_of_one_call_can_go_to_different_trajectories(store: Store) -> None:
    call = a_call("own", choices=2)
    await store.add_call(call)
    counts = await store.finish(
        [a_record("t-0", (CallRef(call_id=call.id),)), a_record("t-1", (CallRef(call_id=call.id, index=1),))]
    )
    assert counts == {"t-0": 1, "t-1": 1}
    found = await store.calls_of(["t-0", "t-1", "own"])
    assert [output.index for output in found["t-0"][0].outputs] == [0]
    assert [output.index for output in found["t-1"][0].outputs] == [1]
    assert found["own"] == ()


async def test_one_choice_in_two_trajectories_is_a_conflict_that_names_both(store: Store) -> None:
    call = a_call("own")
    await store.add_call(call)
    ref = CallRef(call_id=call.id)
    await store.finish([a_record("first", (ref, ref))])
    with pytest.raises(ApiError, match=r"'first'.*'second'") as caught:
        await store.finish([a_record("second", (ref,))])
    assert (caught.value.status, caught.value.code) == (409, "claimed_twice")
    with pytest.raises(ApiError, match=r"'first'.*'own'"):
        await store.finish([a_record("own")])
    with pytest.raises(ApiError, match=r"'x'.*'y'"):
        await store.finish([a_record("x", (ref,)), a_record("y", (ref,))])
    with pytest.raises(ApiError, match="'new'"):
        await store.add_call(a_call("new"))
        mine = (await store.calls_of(["new"]))["new"][0]
        await store.finish([a_record("new"), a_record("thief", (CallRef(call_id=mine.id),))])
    assert (await store.finished(["second", "own", "x", "y", "new", "thief"])) == {}


async def test_finishing_again_with_other_calls_takes_exactly_those(store: Store) -> None:
    calls = [a_call(f"own-{index}", at=float(index)) for index in range(2)]
    for call in calls:
        await store.add_call(call)
    refs = tuple(CallRef(call_id=call.id) for call in calls)
    await store.finish([a_record("t", refs[:1])])
    await store.finish([a_record("t", refs)])
    assert (await store.calls_of(["t"]))["t"] == tuple(calls)
    await store.finish([a_record("t", refs[1:])])
    assert (await store.calls_of(["t"]))["t"] == (calls[1],)
    assert await store.finish([a_record("u", refs[:1])]) == {"u": 1}


async def test_a_trajectory_that_names_its_calls_leaves_out_the_others_under_its_id(store: Store) -> None:
    kept, side = a_call(at=1.0), a_call(at=2.0)
    await store.add_call(kept)
    await store.add_call(side)
    assert await store.finish([a_record("traj-a", (CallRef(call_id=kept.id),))]) == {"traj-a": 1}
    assert (await store.calls_of(["traj-a"]))["traj-a"] == (kept,)


async def test_unknown_calls_are_named_and_nothing_is_written(store: Store) -> None:
    call = a_call("own")
    await store.add_call(call)
    with pytest.raises(ApiError, match=r"call-nope\[0\]") as caught:
        await store.finish(
            [a_record("ok", (CallRef(call_id=call.id),)), a_record("bad", (CallRef(call_id="call-nope"),))]
        )
    assert (caught.value.status, caught.value.code) == (404, "unknown_call")
    with pytest.raises(ApiError, match=r"\[5\]"):
        await store.finish([a_record("bad", (CallRef(call_id=call.id, index=5),))])
    assert await store.finished(["ok", "bad"]) == {}


async def test_a_failed_call_without_choices_stays_with_its_trajectory(store: Store) -> None:
    failed = a_call(choices=0, status="failed").model_copy(update={"error": "the engine died"})
    await store.add_call(failed)
    assert await store.finish([a_record("traj-a")]) == {"traj-a": 1}
    assert (await store.calls_of(["traj-a"]))["traj-a"] == (failed,)


async def test_unclaimed_calls_expire_but_not_those_of_a_rollout_that_still_runs(store: Store) -> None:
    for name, at in (("old", 10.0), ("running", 10.0), ("running", 1000.0), ("sealed", 10.0), ("claimed", 10.0)):
        await store.add_call(a_call(name, at=at, choices=2))
    await store.finish([a_record("sealed")])
    ref = CallRef(call_id=(await store.calls_of(["claimed"]))["claimed"][0].id)
    await store.finish([a_record("claimer", (ref,))])
    assert await store.expire_unclaimed(before=500.0) == 1
    assert await store.expire_unclaimed(before=500.0) == 0
    left = await store.calls_of(["old", "running", "sealed", "claimer"])
    assert {name: len(found) for name, found in left.items()} == {"old": 0, "running": 2, "sealed": 1, "claimer": 1}


async def test_weights_and_marks_come_back_and_may_name_calls_that_failed_or_came_late(store: Store) -> None:
    made = [a_call(at=1.0), a_call(choices=0, status="failed", at=2.0)]
    for call in made:
        await store.add_call(call)
    await store.finish([a_record("traj-a")])
    made.append(await store.add_call(a_call(at=3.0)))
    assert [call.late for call in (await store.calls_of(["traj-a"]))["traj-a"]] == [False, False, True]
    ids = [call.id for call in made]
    record = a_record("traj-a", weights=dict(zip(ids, (0.0, 0.5, 2.0), strict=True)), unused=tuple(ids[1:]))
    await store.finish([record])
    assert (await store.finished(["traj-a"]))["traj-a"] == record


async def test_weights_of_claimed_calls_may_name_only_those(store: Store) -> None:
    claimed, side = a_call(at=1.0), a_call(at=2.0)
    for call in (claimed, side):
        await store.add_call(call)
    refs = (CallRef(call_id=claimed.id),)
    await store.finish([a_record("t", refs, weights={claimed.id: 0.5}, unused=(claimed.id,))])
    with pytest.raises(ApiError, match=f"'t': weights names call '{side.id}'.*not in its list `calls`"):
        await store.finish([a_record("t", refs, weights={claimed.id: 0.5, side.id: 1.0})])
    assert (await store.finished(["t"]))["t"].weights == {claimed.id: 0.5}


@pytest.mark.parametrize("field", ["weights", "call_rewards", "unused"])
async def test_an_id_that_is_no_call_of_the_trajectory_is_refused_with_its_field(store: Store, field: str) -> None:
    own, others = a_call(), a_call("traj-b")
    for call in (own, others):
        await store.add_call(call)
    for stranger in (others.id, "call-nope"):
        ids = (own.id, stranger)
        given: dict[str, Any] = {field: ids if field == "unused" else dict.fromkeys(ids, 0.5)}
        with pytest.raises(ApiError, match=f"trajectory 'traj-a': {field} names call '{stranger}'") as caught:
            await store.finish([a_record("traj-b"), a_record("traj-a", **given)])
        assert (caught.value.status, caught.value.code) == (404, "unknown_call")
        assert caught.value.param == f"trajectories.{field}"
    assert await store.finished(["traj-a", "traj-b"]) == {}


async def test_a_trajectory_that_was_stored_before_calls_had_weights_can_be_read(store: Store, tmp_path: Path) -> None:
    await store.finish([a_record("traj-a")])
    body = json.loads(a_record("traj-a").model_dump_json())
    assert (body.pop("weights"), body.pop("call_rewards"), body.pop("unused")) == ({}, {}, [])
    engine = engine_at(tmp_path / "records.db", 1)
    with engine.begin() as connection:
        connection.execute(sa.update(trajectories).values(body=json.dumps(body)))
    engine.dispose()
    assert await store.finished(["traj-a"]) == {"traj-a": a_record("traj-a")}
    assert (await store.trajectories()).trajectories == (a_record("traj-a"),)


async def test_trajectories_are_listed_newest_first_by_model(store: Store) -> None:
    for index in range(5):
        await store.finish([a_record(f"t-{index}", ended_at=float(index), model="a" if index % 2 else "b")])
    first = await store.trajectories(TrajectoryQuery(limit=1))
    second = await store.trajectories(TrajectoryQuery(limit=2, after=first.next))
    assert [record.id for record in second.trajectories] == ["t-3", "t-2"]
    of_a = await store.trajectories(TrajectoryQuery(model="a"))
    assert [record.id for record in of_a.trajectories] == ["t-3", "t-1"]


async def test_one_trajectory_is_shown_with_its_calls_before_and_after_it_is_finished(store: Store) -> None:
    assert await store.trajectory("traj-a") is None
    call = a_call()
    await store.add_call(call)
    running = await store.trajectory("traj-a")
    assert running is not None and (running.trajectory, running.calls) == (None, (call,))
    await store.finish([a_record("traj-a", metadata={"q": "é"}, logs=("one",))])
    done = await store.trajectory("traj-a")
    assert done is not None and done.trajectory == a_record("traj-a", metadata={"q": "é"}, logs=("one",))


async def test_train_requests_and_logs_are_kept(store: Store) -> None:
    assert await store.train("r") is None
    for state in ("queued", "running"):
        await store.save_train(TrainStatus(id="r", model="m", state=state), '{"id": "r"}')
        assert [status.state for status in await store.unfinished_trains()] == [state]
    await store.save_train(TrainStatus(id="r", model="m", state="failed", error="NaN gradient"), '{"id": "r"}')
    assert await store.unfinished_trains() == []
    assert await store.train("r") == TrainStatus(id="r", model="m", state="failed", error="NaN gradient")
    assert await store.train_request("r") == '{"id": "r"}'
    entries = [LogRequest(metrics={"x": float(index)}) for index in range(3)]
    for entry in entries:
        await store.add_log("m", entry)
    assert await store.logs("m") == entries
    assert await store.logs("n") == []


async def test_a_log_with_the_id_of_another_of_the_model_is_the_same_log(store: Store) -> None:
    first, second, other = (LogRequest(id=name, metrics={"x": 1.0}) for name in ("run_1", "run-1", "run_1"))
    await asyncio.gather(*(store.add_log("m", entry) for entry in (first, second, other)))
    await store.add_log("m", first)
    assert await store.logs("m") == [first, second]
    await store.add_log("n", first)
    assert await store.logs("n") == [first]


async def test_a_bad_row_does_not_take_its_neighbours_with_it(store: Store) -> None:
    good, twice = [a_call(f"t-{index}") for index in range(10)], a_call("same-id")
    await store.add_call(twice)
    jobs = [*good[:5], twice, *good[5:]]
    results = await asyncio.gather(*(store.add_call(call) for call in jobs), return_exceptions=True)
    assert [isinstance(result, StoreError) for result in results] == [False] * 5 + [True] + [False] * 5
    assert all(len(found) == 1 for found in (await store.calls_of([call.trajectory_id for call in good])).values())


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = await Store.open(tmp_path / "records.db")
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.add_call(a_call())


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond `size` bytes: to SQLite, a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_is_an_error_that_names_the_file_and_recording_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    store = await Store.open(path)
    big = a_call().model_copy(update={"messages": ({"role": "user", "content": "x" * 1_000_000},)})
    with file_size_limit(200_000), pytest.raises(StoreFullError, match=str(path)):
        await store.add_call(big)
    assert await store.calls_of(["traj-a"]) == {"traj-a": ()}
    kept = await store.add_call(big)
    assert await store.calls_of(["traj-a"]) == {"traj-a": (kept,)}
    await store.close()


@pytest.mark.parametrize(("schema", "remedy"), [("99", "upgrade with"), ("1", "move them away")])
async def test_records_of_another_schema_are_refused(tmp_path: Path, schema: str, remedy: str) -> None:
    path = tmp_path / "records.db"
    await (await Store.open(path)).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (schema,))
    raw.close()
    written = path.read_bytes()
    with pytest.raises(StoreError, match=f"schema '{schema}'.*{remedy}.*--dir"):
        await Store.open(path)
    with pytest.raises(StoreError, match=f"schema '{schema}'.*{remedy}"):
        ReadOnlyRecords.open(path)
    assert path.read_bytes() == written


async def test_a_store_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(StoreError, match=r"/nowhere/at/all/records\.db"):
        await Store.open(Path("/nowhere/at/all/records.db"))


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    path.write_bytes(b"these are not records\n" * 100)
    with pytest.raises(StoreError, match=str(path)):
        await Store.open(path)


RECORDING = """
import asyncio, sys
from pathlib import Path
from tests.server.records.test_store import a_call
from offbook.server.records.database import ReadOnlyRecords
from offbook.server.records.store import Store

async def main():
    store = await Store.open(Path(sys.argv[1]))
    async def record(name):
        while True:
            call = await store.add_call(a_call(name))
            print(name, call.id, flush=True)
    await asyncio.gather(*(record(f"t-{i}") for i in range(8)))

asyncio.run(main())
"""


async def test_everything_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with subprocess.Popen(
        [sys.executable, "-c", RECORDING, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        acknowledged = [process.stdout.readline().split() for _ in range(200)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [
            line.split() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")
        ]
    store = await Store.open(path)
    found = await store.calls_of([f"t-{index}" for index in range(8)])
    ids = {call.id for calls in found.values() for call in calls}
    assert len(acknowledged) >= 200
    assert {call_id for _, call_id in acknowledged} <= ids
    await store.close()


async def test_what_has_expired_is_told_when_its_trajectory_is_finished_and_nothing_in_flight_expires(
    store: Store,
) -> None:
    for name in ("gone", "gone", "sampled"):
        await store.add_call(a_call(name, at=10.0))
    assert await store.expire_unclaimed(500.0, ["sampled"]) == 2
    assert await store.finish([a_record("gone"), a_record("sampled")]) == {"gone": 0, "sampled": 1}
    assert await store.expired(["gone", "sampled", "unknown"]) == {"gone": 2}
