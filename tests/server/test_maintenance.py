"""Damaged directories: what the server makes of them at its start, `offbook verify` and `offbook backup`."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from offbook.base.errors import ConfigError, StoreError
from offbook.base.types import TrainResult
from offbook.base.wire import TrainStatus
from offbook.commands.main import run as main
from offbook.engine import checkpoint_files
from offbook.engine.learner.checkpoints import newest
from offbook.server.base_model import BaseModelPath
from offbook.server.directory_lock import DirectoryLock
from offbook.server.errors import ApiError
from offbook.server.maintenance import backup, verify
from offbook.server.models.checkpoints import read_facts
from offbook.server.models.registry import ModelRegistry
from offbook.server.records import database
from offbook.server.records.store import Store
from offbook.server.training.history import TrainHistory
from offbook.server.training.jobs import JobFolders

WRITTEN = Path(__file__).with_name("written_directory") / "files"


@pytest.fixture(autouse=True)
def umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("offbook.server.maintenance.os.umask", lambda _: None)
    yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a model of two steps, one of none, and records."""
    return Path(shutil.copytree(WRITTEN, tmp_path / "dir"))


def agent(folder: Path) -> Path:
    return folder / "desk" / "models" / "agent"


def registry(folder: Path) -> ModelRegistry:
    return ModelRegistry.read(folder, BaseModelPath("tiny", folder, "tiny"))


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Store]:
    store = await Store.open(folder / "records.db")
    try:
        yield store
    finally:
        await store.close()


# ---- model.json


@pytest.mark.parametrize("damage", ["lost", "cut", "foreign"])
def test_a_lost_or_cut_model_json_is_made_anew_from_the_newest_checkpoint(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = agent(folder) / "model.json"
    before = read_facts(agent(folder))
    if damage == "lost":
        path.unlink()
    else:
        path.write_text(path.read_text()[:20] if damage == "cut" else "[]")
    model = registry(folder).model("agent")
    assert (model.facts, model.step) == (before, 2)
    assert "what its newest checkpoint says" in caplog.text and read_facts(agent(folder)) == before
    assert [each.name for each in agent(folder).glob("model.json.*")] == (
        [] if damage == "lost" else [f"{path.name}.damaged-0"]
    )


def test_a_model_without_facts_and_without_a_whole_checkpoint_is_never_served_as_its_base(folder: Path) -> None:
    from offbook.base.wire import RegisterRequest
    from offbook.server.models.leases import AdapterLeases
    from offbook.server.models.registration import ModelRegistration

    (agent(folder) / "model.json").unlink()
    for step in ("0001", "0002"):
        (agent(folder) / "checkpoints" / step / "adapter_config.json").unlink()
    models = registry(folder)
    assert models.get("agent") is None
    leases = AdapterLeases(models, None)  # type: ignore[arg-type]  # nothing is sampled
    with pytest.raises(ApiError, match="none is whole"):
        ModelRegistration(folder, models, leases).register(
            RegisterRequest(name="agent", project="desk", base_model="tiny")
        )


async def test_a_newest_step_that_is_gone_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(folder) as store:
        result = TrainResult(applied=True, step=2, request_id="r", model="agent", metrics={}, checkpoint="x")
        await store.save_train(TrainStatus(id="r", model="agent", state="done", result=result), "{}")
        for gone in (False, True):
            if gone:
                shutil.rmtree(agent(folder) / "checkpoints" / "0002")
            caplog.clear()
            await TrainHistory(store, registry(folder), JobFolders(folder / "jobs", store)).settle()
            told = "agent was trained to step 2" in caplog.text and "continues from step 1" in caplog.text
            assert told == gone


# ---- records


async def test_records_say_whose_they_are_and_of_which_version(folder: Path) -> None:
    async with opened(folder):
        pass
    with sqlite3.connect(folder / "records.db") as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (database.APPLICATION_ID,)
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    connection.close()


async def test_records_that_are_empty_beside_checkpoints_foreign_or_damaged_are_refused(folder: Path) -> None:
    path = folder / "records.db"
    async with opened(folder):
        pass
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="empty, but there are checkpoints"):
        await Store.open(path)
    path.write_text("a text of somebody else's, which is no database")
    with pytest.raises(StoreError, match="not a SQLite database"):
        await Store.open(path)
    path.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    with pytest.raises(StoreError, match=r"damaged|malformed"):
        await Store.open(path)
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (id INTEGER)")
    connection.close()
    with pytest.raises(StoreError, match=r"not Offbook's \(songs\)"):
        await Store.open(path)


async def test_records_that_are_missing_beside_checkpoints_are_refused_until_a_repair_starts_new_ones(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "records.db"
    path.unlink()
    with pytest.raises(StoreError, match=r"the file is missing, but there are checkpoints.* --repair"):
        await Store.open(path)
    assert not path.exists()
    assert main(["verify", "--dir", str(folder)]) == 1
    assert main(["verify", "--dir", str(folder), "--repair"]) == 0
    assert "new empty records" in capsys.readouterr().out
    assert path.stat().st_mode & 0o077 == 0
    async with opened(folder) as store:
        assert (await store.trajectories()).trajectories == ()


async def test_a_server_that_does_not_train_begins_records_beside_a_copied_model(folder: Path) -> None:
    (folder / "records.db").unlink()
    store = await Store.open(folder / "records.db", may_begin=True)
    await store.close()


async def test_records_whose_log_lies_alone_are_refused_because_sqlite_would_delete_it(tmp_path: Path) -> None:
    (tmp_path / "records.db-wal").write_bytes(b"commits")
    for may_begin in (False, True):
        with pytest.raises(StoreError, match=r"its log records\.db-wal is there"):
            await Store.open(tmp_path / "records.db", may_begin=may_begin)
    assert (tmp_path / "records.db-wal").read_bytes() == b"commits"


async def test_an_empty_file_where_nothing_was_trained_is_a_new_database(tmp_path: Path) -> None:
    (tmp_path / "records.db").touch()
    async with opened(tmp_path) as store:
        assert await store.calls_of(["a"]) == {"a": ()}


# ---- offbook verify


def test_verify_names_what_is_damaged_and_repair_puts_it_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(folder, repair=False) == 0
    assert "0 damaged" in capsys.readouterr().out
    weights = agent(folder) / "checkpoints" / "0002" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    (agent(folder) / "state.json").write_text("{")
    (agent(folder) / "model.json").write_text("")
    (folder / "records.db").write_text("x")
    assert main(["verify", "--dir", str(folder)]) == 1
    told = capsys.readouterr().out
    for part in ("0002", "state.json", "model.json", "records.db"):
        assert f"{part}: " in told
    assert "4 damaged" in told and weights.exists()
    assert main(["verify", "--dir", str(folder), "--repair"]) == 0
    assert "written again" in capsys.readouterr().out
    assert verify(folder, repair=False) == 0
    assert registry(folder).model("agent").step == 1
    assert (folder / "records.db.damaged-0").read_text() == "x"


OWN = ("server.lock", "records.db-wal", "records.db-shm")


def unreadable(path: Path) -> None:
    """Put a file in the place of another whose every read fails."""
    path.rename(path.with_name(f"{path.name}.kept"))
    path.symlink_to("/proc/self/mem")


def assert_nothing_is_taken_for_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.rglob("*"))
    assert main(["verify", "--dir", str(folder), "--repair"]) == 1
    told = capsys.readouterr().out
    assert "0 damaged, 1 could not be checked" in told and "It may be whole and was not changed" in told
    assert {path for path in {*folder.rglob("*")} ^ {*before} if path.name not in OWN} == set()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reads fail")
@pytest.mark.parametrize("name", ["model.json", "state.json", "checkpoints/0002/offbook.json"])
def test_a_file_that_cannot_be_read_is_not_damaged(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (agent(folder) / "state.json").write_text("{}")
    unreadable(agent(folder) / name)
    assert_nothing_is_taken_for_damage(folder, capsys)
    if name == "state.json":
        return  # which the start of a server does not read
    with pytest.raises(StoreError, match="could not be checked"):
        registry(folder)  # else a model goes on from an older step, or without its project
    assert not list(folder.rglob("*.damaged-*"))


@pytest.mark.parametrize("why", ["unreadable", "locked", "full"])
async def test_records_that_cannot_be_checked_are_not_damaged(
    folder: Path, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "records.db"
    async with opened(folder):
        pass
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.1)
    with ExitStack() as stack:
        if why == "unreadable":
            unreadable(path)
        elif why == "locked":
            other = stack.enter_context(closing(sqlite3.connect(path)))
            other.execute("PRAGMA locking_mode=EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
        else:  # SQLite cannot create the index of its log
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        assert_nothing_is_taken_for_damage(folder, capsys)
        with pytest.raises(StoreError, match="could not be checked") as refused:
            await Store.open(path)
        assert "--repair" not in str(refused.value)


@pytest.mark.parametrize(
    ("code", "damage"), [("SQLITE_CORRUPT_VTAB", True), ("SQLITE_NOTADB", True), ("SQLITE_FULL", False), ("SQLITE_IOERR_READ", False), ("SQLITE_BUSY_SNAPSHOT", False), ("SQLITE_CANTOPEN", False), ("SQLITE_NOMEM", False)]
)  # fmt: skip
def test_only_what_sqlite_says_of_the_content_is_damage(
    folder: Path, code: str, damage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = sqlite3.OperationalError("what SQLite says")
    error.sqlite_errorcode = getattr(sqlite3, code)

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("offbook.server.records.database.sqlite3.connect", fails)
    with nullcontext() if damage else pytest.raises(StoreError, match="was not changed"):
        assert database.fault_of(folder / "records.db", "quick_check") == "what SQLite says"


def test_a_page_that_cannot_be_read_is_not_damage() -> None:
    def checked(line: str) -> str | None:
        return database._damaged(cast(sqlite3.Connection, SimpleNamespace(execute=lambda _: [(line,)])), "quick_check")

    assert checked("ok") is None
    assert "error code 11" in (checked("Tree 3 page 9: btreeInitPage() returns error code 11") or "")
    with pytest.raises(sqlite3.OperationalError):
        checked("Tree 3 page 9: unable to get the page. error code=266")


def test_a_checkpoint_on_a_disk_that_fails_is_not_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, framework: str) -> object:
        if path.parent.name == "0002":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opens(path, framework)

    opens = checkpoint_files.safe_open
    monkeypatch.setattr(checkpoint_files, "safe_open", fails)
    assert_nothing_is_taken_for_damage(folder, capsys)
    with pytest.raises(StoreError, match="Input/output error"):
        registry(folder)
    with pytest.raises(StoreError, match="Input/output error"):
        newest(agent(folder) / "checkpoints", print)
    assert (agent(folder) / "checkpoints" / "0002").is_dir()


def test_a_checkpoint_is_not_damaged_when_no_more_files_can_be_opened(folder: Path) -> None:
    path = agent(folder) / "checkpoints" / "0002"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with pytest.raises(StoreError, match="Too many open files"):
            checkpoint_files.read(path)
    assert checkpoint_files.read(path).step == 2


@pytest.mark.parametrize("name", ["records.db", "desk/models/agent/model.json", "desk/models/agent/state.json"])
def test_a_fifo_in_place_of_a_file_is_damage_and_blocks_nothing(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert verify(folder, repair=True) == 0
    assert f"{name}: it is not a regular file" in capsys.readouterr().out
    assert verify(folder, repair=False) == 0


def test_verify_waits_for_no_server(folder: Path) -> None:
    lock = DirectoryLock(folder)
    with pytest.raises(ConfigError, match="another server has this directory"):
        verify(folder, repair=False)
    lock.release()
    assert main(["verify", "--dir", str(folder / "nowhere")]) == 2


# ---- offbook backup


async def test_a_backup_of_a_directory_in_use_is_whole_and_can_be_served(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "copy"
    lock = DirectoryLock(folder)
    async with opened(folder) as store:
        await store.save_train(TrainStatus(id="r", model="agent", state="queued"), "{}")
        assert backup(folder, output) == 0  # the newest write lies in the write-ahead log only
    lock.release()
    assert verify(output, repair=False) == 0
    assert registry(output).model("agent").step == 2
    async with opened(output) as store:
        assert [status.id for status in await store.unfinished_trains()] == ["r"]
    assert not list(tmp_path.glob(".copy*"))
    with pytest.raises(ConfigError, match="exists already"):
        backup(folder, output)


def write_records(path: Path, write: Callable[[sqlite3.Connection], object]) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        write(connection)


@pytest.mark.parametrize("damage", ["records", "no records", "weights", "model.json", "state.json"])
def test_a_backup_whose_copy_is_damaged_is_no_success(
    folder: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "copy"
    records, weights = folder / "records.db", agent(folder) / "checkpoints" / "0002" / "adapter_model.safetensors"
    match damage:
        case "records":
            write_records(records, lambda connection: connection.execute("PRAGMA wal_checkpoint"))
            content = records.read_bytes()
            records.write_bytes(content[:8192] + b"\xff" * 4096 + content[12288:])
        case "no records":
            records.unlink()
        case "weights":
            weights.write_bytes(weights.read_bytes()[:-4])
        case _:
            (agent(folder) / damage).write_text("{")
    assert main(["backup", "--dir", str(folder), "--output", str(output)]) == 1
    told = capsys.readouterr().out
    name = {"weights": "0002", "records": "records.db", "no records": "records.db"}.get(damage, damage)
    assert f"damaged: {output}" in told and f"/{name}: " in told and "1 parts of the copy are not whole" in told
    assert ".part" not in told and not list(tmp_path.glob(".copy*"))
    assert read_facts(agent(output).with_name("planner"))  # the rest of the copy is there
