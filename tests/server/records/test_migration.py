"""Records of before: copied, then migrated whole or not at all. `schema_1.sql` is what the last version with schema 1 wrote."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.paths import ROOT
from tests.server.records.test_store import a_call, a_record, file_size_limit
from understudy.errors import StoreError
from understudy.server.errors import StoreFullError
from understudy.server.records import schema
from understudy.server.records.store import Store
from understudy.types import RolloutPlace
from understudy.wire import TrajectoryQuery

DUMP = (Path(__file__).parent / "schema_1.sql").read_text(encoding="utf-8")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database with schema 1: two models in one run, an evaluation, rollouts that failed or were never trained."""
    file = tmp_path / "records.db"
    with closing(sqlite3.connect(file)) as raw:
        raw.executescript(DUMP)
    return file


@pytest.fixture
def old_postgres(old: Path, postgres: str) -> Iterator[str]:
    """The same database, on PostgreSQL."""
    tables = sa.MetaData()
    source, target = sa.create_engine(f"sqlite:///{old}"), sa.create_engine(postgres)
    tables.reflect(source)
    for table in tables.tables.values():
        for column in table.columns:
            column.type = column.type.as_generic()
        for index in table.indexes:
            index.dialect_options.pop("sqlite", None)
    tables.create_all(target)
    with source.connect() as reading, target.begin() as writing:
        for table in tables.sorted_tables:
            writing.execute(table.insert(), [row._asdict() for row in reading.execute(table.select())])
    source.dispose()
    yield postgres
    tables.drop_all(target)
    target.dispose()


def dump_of(file: Path) -> str:
    with closing(sqlite3.connect(file)) as raw:
        return "\n".join(raw.iterdump()) + "\n"


async def open_and_close(file: Path) -> None:
    await (await Store.open(f"sqlite:///{file}")).close()


BLUE: dict[str, Any] = {"split": "train", "step": 2, "scenario": "blue", "group": "train-planner/1"}
PLACES = {
    "held-out": RolloutPlace(split="val", step=3),
    "named": RolloutPlace(split="train", step=3, group="train-planner/0", index=0),
    "lost": RolloutPlace(**BLUE, index=2),
    "silent": RolloutPlace(**BLUE, index=1),
    "both": RolloutPlace(**BLUE, index=0),
    "alone": RolloutPlace(),
}


async def check_migrated(store: Store) -> None:
    page = await store.trajectories()
    assert {record.id: record.place for record in page.trajectories} == PLACES
    assert [record.id for record in page.trajectories] == list(PLACES)
    both = next(record for record in page.trajectories if record.id == "both")
    assert (both.reward, both.metadata, both.model) == (1.0, {"scenario_id": "blue"}, "planner")

    async def listed(**filters: object) -> set[str]:
        return {each.id for each in (await store.trajectories(TrajectoryQuery.model_validate(filters))).trajectories}

    assert await listed(model="planner") == set(PLACES)
    assert await listed(model="writer") == {"both", "silent", "lost", "named", "held-out"}
    assert await listed(model="critic") == set()  # it was called late
    assert await listed(group="train-planner/1") == await listed(scenario="blue") == {"both", "silent", "lost"}
    assert await listed(failed=True) == {"silent", "lost"}
    assert await listed(scored=False) == {"silent", "lost", "alone"}
    calls = (await store.calls_of(["both"]))["both"]
    assert [(call.model, call.late) for call in calls] == [("planner", False), ("writer", False), ("critic", True)]
    assert {status.id for status in [await store.train(f"train-{name}") for name in ("planner", "writer")] if status}
    await store.add_call(a_call("new"))
    assert await store.finish([a_record("new"), a_record("alone")]) == {"new": 1, "alone": 0}
    assert [each.id for each in (await store.trajectories()).trajectories] == ["new", *PLACES]


async def test_old_records_are_migrated_with_what_can_be_known_of_them_and_a_copy_is_kept(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "understudy"):
        store = await Store.open(f"sqlite:///{old}")
    copy = Path(f"{old}.schema-1.bak")
    assert f"from schema 1 to 2 (6 trajectories); a copy is at {copy}" in caplog.text
    await check_migrated(store)
    await store.close()
    assert dump_of(copy) == DUMP
    assert sorted(path.name for path in old.parent.iterdir()) == ["records.db", "records.db.schema-1.bak"]
    changed = copy.stat().st_mtime_ns
    await open_and_close(old)
    assert copy.stat().st_mtime_ns == changed  # nothing is left to migrate


async def test_on_postgresql_there_is_no_copy_and_the_log_says_so(
    old_postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(old_postgres)
    assert "without a copy: use the backups of postgresql" in caplog.text
    await check_migrated(store)
    await store.close()


async def test_the_copy_has_what_only_the_write_ahead_log_has(old: Path) -> None:
    with closing(sqlite3.connect(old, isolation_level=None)) as running:
        running.execute("PRAGMA journal_mode=WAL")
        running.execute("UPDATE trajectories SET reward = 0.75 WHERE id = 'both'")
        assert b"0.75" not in old.read_bytes()
        await open_and_close(old)
    with closing(sqlite3.connect(f"{old}.schema-1.bak")) as raw:
        assert raw.execute("SELECT reward FROM trajectories WHERE id = 'both'").fetchone() == (0.75,)


KILLED = """
import asyncio, os, signal, sys
from understudy.server.records import schema
from understudy.server.records.store import Store

migrate = schema.MIGRATIONS[1]

def killed(connection):
    migrate(connection)
    print("migrated, not committed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

schema.MIGRATIONS[1] = killed
asyncio.run(Store.open(sys.argv[1]))
"""


async def test_a_migration_that_is_killed_leaves_the_old_records_and_is_made_at_the_next_start(old: Path) -> None:
    url = f"sqlite:///{old}"
    killed = subprocess.run([sys.executable, "-c", KILLED, url], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "migrated, not committed\n")
    assert dump_of(old) == DUMP
    Path(f"{old}.schema-1.bak.part").write_bytes(b"half a copy, of a process killed earlier")
    store = await Store.open(url)
    await check_migrated(store)
    await store.close()
    assert dump_of(Path(f"{old}.schema-1.bak")) == DUMP


async def test_a_migration_that_fails_changes_nothing_and_says_where_the_copy_is(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate = schema.MIGRATIONS[1]

    def failing(connection: sa.Connection) -> None:
        migrate(connection)
        raise KeyError("trajectory_ids")

    with monkeypatch.context() as patch:
        patch.setitem(schema.MIGRATIONS, 1, failing)
        with pytest.raises(
            StoreError, match=r"KeyError.*The records are unchanged, with schema 1.*records.db.schema-1.bak"
        ):
            await open_and_close(old)
    assert dump_of(old) == DUMP
    await open_and_close(old)


@pytest.mark.parametrize(
    ("most", "says"),
    [
        (
            40_000,
            r"could not copy the records at .*records.db before.*the records are unchanged: free space for a copy",
        ),
        (None, r"no space left to migrate records at .*records.db.*The records are unchanged.*a copy is at .*bak"),
    ],
)
async def test_a_disk_that_is_full_stops_the_migration_and_changes_nothing(
    old: Path, most: int | None, says: str
) -> None:
    with file_size_limit(most or old.stat().st_size + 1), pytest.raises(StoreFullError, match=says):
        await open_and_close(
            old
        )  # `most`: bytes of a file; else the copy fits, and the log of the transaction does not
    assert dump_of(old) == DUMP
    assert not [path for path in old.parent.iterdir() if ".part" in path.name]
    await open_and_close(old)


async def test_a_copy_is_no_more_readable_than_the_records(old: Path) -> None:
    os.chmod(old, 0o600)
    await open_and_close(old)
    assert Path(f"{old}.schema-1.bak").stat().st_mode & 0o777 == 0o600
