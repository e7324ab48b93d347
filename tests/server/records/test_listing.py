"""Lists of trajectories: every filter, pages that stay put, and plans that read no more than they show."""

from __future__ import annotations

import itertools
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from offbook.base.types import CallRef, RolloutException, RolloutPlace
from offbook.base.wire import TrajectoryQuery
from offbook.server.records.database import engine_at
from offbook.server.records.listing import DRIVING, statement
from offbook.server.records.store import Store
from offbook.server.records.tables import metadata
from tests.server.records.test_store import a_call, a_record

FAILED = RolloutException(type="ValueError", message="away", traceback="")


async def listed(store: Store, **filters: object) -> list[str]:
    page = await store.trajectories(TrajectoryQuery.model_validate(filters))
    assert page.next is None
    return [record.id for record in page.trajectories]


async def test_every_filter_finds_its_trajectories_alone_and_with_others(store: Store) -> None:
    for number, (run, split, step) in enumerate(itertools.product(("r1", "r2"), ("train", "val"), (0, 1))):
        place = RolloutPlace(run=run, split=split, step=step, scenario=f"s{number % 2}", group=f"g{number}", index=0)
        mate = place.model_copy(update={"index": 1})
        await store.finish([a_record(f"{number}a", place=place), a_record(f"{number}b", place=mate, reward=None)])
    await store.finish([a_record("by hand", reward=None, exception=FAILED)])
    assert await listed(store, run="r1", split="val") == ["3b", "3a", "2b", "2a"]
    assert await listed(store, run="r2", step=1) == ["7b", "7a", "5b", "5a"]
    assert await listed(store, run="r2", step=1, split="train") == ["5b", "5a"]
    assert await listed(store, step=0, scored=True) == ["6a", "4a", "2a", "0a"]
    assert await listed(store, scenario="s1", run="r1") == ["3b", "3a", "1b", "1a"]
    assert await listed(store, group="g3") == ["3b", "3a"]
    assert await listed(store, group="g3", run="r2") == []
    assert await listed(store, groups=("g6", "g3")) == ["6b", "6a", "3b", "3a"]
    assert await listed(store, groups=("g6", "g3"), run="r1") == await listed(store, groups=("g3",)) == ["3b", "3a"]
    assert await listed(store, groups=("g6", "g3"), group="g6") == ["6b", "6a"]
    assert await listed(store, split="train", scored=False) == ["5b", "4b", "1b", "0b"]
    assert await listed(store, failed=True) == await listed(store, failed=True, scored=False) == ["by hand"]
    assert await listed(store, failed=True, run="r1") == []
    assert len(await listed(store, failed=False, model="default")) == 16
    assert await listed(store, model="another") == []


async def test_the_place_comes_back_as_it_was_stored(store: Store) -> None:
    place = RolloutPlace(run="r", split="val-sampled", step=7, scenario="é" * 500, group="g", index=3)
    await store.finish([a_record("placed", place=place), a_record("by hand")])
    assert (await store.finished(["placed"]))["placed"].place == place
    by_hand, placed = (await store.trajectories()).trajectories
    assert (placed.place, by_hand.place) == (place, RolloutPlace())


async def test_pages_neither_repeat_nor_lose_a_trajectory_while_others_are_finished_anew_and_again(
    store: Store,
) -> None:
    ids = [f"t{number}" for number in range(7)]
    await store.finish([a_record(name, ended_at=5.0) for name in ids])
    seen: list[str] = []
    query = TrajectoryQuery(limit=2)
    for turn in range(4):
        page = await store.trajectories(query)
        seen += [record.id for record in page.trajectories]
        await store.finish([a_record(f"new{turn}", ended_at=1.0), a_record("t0", reward=0.1 * turn, ended_at=99.0)])
        query = query.model_copy(update={"after": page.next})
    assert (seen, page.next) == (ids[::-1], None)
    assert (await listed(store))[:4] == ["new3", "new2", "new1", "new0"]


async def test_the_newest_trajectory_can_be_finished_again_together_with_new_ones(store: Store) -> None:
    await store.finish([a_record("old"), a_record("newest")])
    await store.finish([a_record("new"), a_record("newest", reward=0.5)])
    assert await listed(store) == ["new", "newest", "old"]


async def test_a_trajectory_is_listed_under_every_model_that_it_called_or_was_finished_for(store: Store) -> None:
    for trajectory, model in (("whole", "writer"), ("whole", "critic"), ("open", "writer"), ("open", "critic")):
        await store.add_call(a_call(trajectory).model_copy(update={"model": model}))
    await store.add_call(a_call("whole", choices=0, status="failed").model_copy(update={"model": "broken"}))
    of_writer = next(call for call in (await store.calls_of(["open"]))["open"] if call.model == "writer")
    claimed = (CallRef(call_id=of_writer.id),)
    await store.finish([a_record("whole", model="planner"), a_record("named", claimed, model="planner")])
    await store.finish([a_record("lost", (), model="planner", exception=FAILED, reward=None)])
    await store.add_call(a_call("whole").model_copy(update={"model": "late"}))
    await store.finish([a_record("lost", (), model="writer", exception=FAILED, reward=None), a_record("whole")])
    assert await listed(store, model="planner") == ["lost", "named", "whole"]
    assert await listed(store, model="writer") == ["lost", "named", "whole"]
    assert await listed(store, model="critic") == await listed(store, model="broken") == ["whole"]
    assert await listed(store, model="default") == ["whole"]
    assert await listed(store, model="late") == []
    assert await listed(store, model="writer", failed=True) == ["lost"]


FILTERS: dict[str, object] = {
    "model": "m",
    "run": "r",
    "split": "train",
    "step": 3,
    "scenario": "s",
    "group": "g",
    "scored": False,
    "failed": True,
    "after": "77",
}
INDEX_OF = {
    ("group",): "trajectories_group (group_id=?",
    ("scenario",): "trajectories_scenario (scenario=?",
    ("run", "step"): "trajectories_run_step (run=? AND step=?",
    ("failed",): "trajectories_failed",
    ("unscored",): "trajectories_unscored",
    ("run", "split"): "trajectories_run_split (run=? AND split=?",
    ("run",): "trajectories_run (run=?",
    ("model",): "trajectory_models_model (model=?",
    ("step",): "trajectories_step (step=?",
    ("split",): "trajectories_split (split=?",
    (): "trajectories_seq",
}


def test_every_list_follows_the_index_of_its_narrowest_filter_and_sorts_nothing(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "records.db", 5)
    with engine.connect() as connection:
        metadata.create_all(connection)
        for chosen in itertools.product((False, True), repeat=len(FILTERS)):
            names = {name for name, taken in zip(FILTERS, chosen, strict=True) if taken}
            query = statement(TrajectoryQuery.model_validate({name: FILTERS[name] for name in names})).limit(10)
            compiled = query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
            first, *rest = [row.detail for row in connection.execute(sa.text(f"EXPLAIN QUERY PLAN {compiled}"))]
            given = names | ({"unscored"} if "scored" in names else set())
            driving = next(each for each in DRIVING if given >= set(each))
            assert f"INDEX {INDEX_OF[driving]}" in first, (names, first)
            along = {("failed",), ("unscored",), ()}  # partial indexes, or all in the order of lists
            assert first.startswith("SEARCH") or (driving in along and "after" not in names), (names, first)
            assert all(line.startswith(("SEARCH", "CORRELATED")) for line in rest), (names, rest)
    engine.dispose()
