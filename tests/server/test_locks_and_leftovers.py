"""What stands in a server's way at its start and beside it: addresses, locks, leftovers, a learner that says nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from offbook.base.config import LoraOptions
from offbook.base.errors import ConfigError, StoreError
from offbook.base.server_options import EngineOptions
from offbook.base.wire import GroupRecord, TrainRequest, TrainStatus
from offbook.engine.protocol import Failed, TrainCommand
from offbook.http_listener.listening import listen, local_url, url_of
from offbook.server.base_model import BaseModelPath
from offbook.server.directory_lock import DirectoryLock, sweep
from offbook.server.http.auth import key_for
from offbook.server.training import learner_client, queue
from offbook.server.training.learner_client import LearnerClient
from offbook.server.training.queue import TrainQueue
from offbook.server.training.runner import TrainFeed
from tests.server.records.test_store import file_size_limit

# ---- addresses


@pytest.mark.parametrize("host", ["::", "0.0.0.0"])
def test_the_address_that_clients_here_are_told_answers(host: str) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with listen(host, 0) as listener:
        url = local_url(url_of(host, listener), listener)
        name, _, port = url.removeprefix("http://").rpartition(":")
        socket.create_connection((name.strip("[]"), int(port)), 5).close()
        assert name == "127.0.0.1"


# ---- the lock


def test_a_deleted_lock_file_lets_no_second_server_in(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    (tmp_path / "server.lock").unlink()
    with pytest.raises(ConfigError, match="another server has this directory"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


# ---- a directory that cannot be written


def test_a_full_disk_ends_the_start_with_a_sentence_and_locks_nothing(tmp_path: Path) -> None:
    with file_size_limit(0), pytest.raises(ConfigError, match=r"cannot be written .*free space there"):
        DirectoryLock(tmp_path)
    lock = DirectoryLock(tmp_path)
    with file_size_limit(0), pytest.raises(ConfigError, match=r"cannot be written .*free space there"):
        lock.announce("http://127.0.0.1:1", "tiny", None)
    lock.release()
    with file_size_limit(0), pytest.raises(ConfigError, match=r"key: cannot be written .*or set --api-key"):
        key_for("0.0.0.0", None, tmp_path)
    assert key_for("0.0.0.0", None, tmp_path) is not None


def test_a_key_of_other_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"key: the key cannot be read .*delete the file"):
        key_for("0.0.0.0", None, tmp_path)
    (tmp_path / "server.lock").write_bytes(b"\xff\xfe")
    DirectoryLock(tmp_path).release()


# ---- what a crash leaves


def test_half_made_things_are_swept_at_the_start_and_nothing_else_is(tmp_path: Path) -> None:
    model = tmp_path / "p" / "models" / "m"
    kept = [model / "checkpoints" / "0001", model / "checkpoints" / "0002.damaged-0", tmp_path / "jobs" / "failed"]
    left = [
        model.parent / ".fork-n" / "checkpoints",
        model / "checkpoints" / ".scratch-7",
        model / "checkpoints" / ".deleting-0001",
        tmp_path / "exports" / ".m@1-peft",
    ]
    for folder in (*kept, *left):
        folder.mkdir(parents=True)
    files = [model / ".state.json.ab.part", tmp_path / "server.json.part"]
    for file in (*files, model / "state.json"):
        file.write_text("{}")
    assert sweep(tmp_path) == 6
    assert all(folder.is_dir() for folder in kept) and (model / "state.json").exists()
    assert not any(path.exists() for path in (*left, *files, model.parent / ".fork-n"))


# ---- a learner that says nothing

SILENT = """
import sys, time
print('{"kind": "ready", "facts": {}}', flush=True)
for line in sys.stdin:
    print('{"kind": "progress", "request_id": "r", "phase": "update", "done": 0, "total": 1}', flush=True)
    time.sleep(600)
"""


class Scripted(LearnerClient):
    def _argv(self) -> list[str]:
        return [sys.executable, "-c", SILENT]


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_learner_that_hangs_or_is_stopped_is_ended_and_its_step_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stopped: bool
) -> None:
    monkeypatch.setattr(learner_client, "HEARTBEAT_SECONDS", 0.05)
    learner = Scripted(BaseModelPath("tiny", tmp_path, "tiny"), EngineOptions(), tmp_path / "learner.log", 0.4)
    command = TrainCommand(request_id="r", model="m", job=tmp_path, checkpoints=tmp_path, step=0, lora=LoraOptions())
    events = []
    async with asyncio.timeout(60):
        async for event in learner.run(command):
            events.append(event)
            if stopped and learner.pid is not None:
                os.kill(learner.pid, signal.SIGSTOP)
    failed = events[-1]
    assert isinstance(failed, Failed) and "--step-timeout" in failed.message
    assert ("was stopped" if stopped else "no sign of progress") in failed.message
    assert ("kill -CONT" in caplog.text) == stopped
    assert learner.state == "stopped" and learner.pid is None
    await learner.stop()


# ---- a lock on the records that lasts


class Locked:
    """A history whose store refuses a while."""

    def __init__(self, refusals: int) -> None:
        self.left = refusals
        self.saved: list[str] = []
        self.stored = asyncio.Event()

    async def save(self, request: TrainRequest, status: TrainStatus) -> None:
        del request
        if self.left:
            self.left -= 1
            raise StoreError("database is locked")
        self.saved.append(status.state)
        self.stored.set()


async def test_an_outcome_that_a_locked_database_refused_is_stored_when_the_lock_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "STORE_AGAIN_SECONDS", 0.01)
    history = Locked(refusals=3)
    made = TrainQueue(history, None, None)  # type: ignore[arg-type]  # no jobs and no learner are needed
    feed = TrainFeed(TrainRequest(id="r", model="m", groups=(GroupRecord(trajectory_ids=("a",)),)))
    async with asyncio.timeout(10):
        await made._close(feed, TrainStatus(id="r", model="m", state="failed", error="x"))
        await history.stored.wait()
    assert history.saved == ["failed"]


class Prepared:
    """Jobs that need no files."""

    async def prepare(self, request: TrainRequest) -> None:
        del request


async def test_an_outcome_that_waits_to_be_stored_never_replaces_that_of_the_request_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "STORE_AGAIN_SECONDS", 0.01)
    history = Locked(refusals=1)
    made = TrainQueue(history, Prepared(), None)  # type: ignore[arg-type]
    request = TrainRequest(id="r", model="m", groups=(GroupRecord(trajectory_ids=("a",)),))
    await made._close(TrainFeed(request), TrainStatus(id="r", model="m", state="failed", error="x"))
    feed = await made._accept(request)
    await made._close(feed, TrainStatus(id="r", model="m", state="done"))
    await asyncio.sleep(0.1)
    assert history.saved == ["queued", "done"]


async def test_an_outcome_that_waits_to_be_stored_is_stored_when_the_server_ends() -> None:
    history = Locked(refusals=1)
    made = TrainQueue(history, Prepared(), None)  # type: ignore[arg-type]
    request = TrainRequest(id="r", model="m", groups=(GroupRecord(trajectory_ids=("a",)),))
    await made._close(TrainFeed(request), TrainStatus(id="r", model="m", state="done"))
    made._idle.set()
    async with asyncio.timeout(10):
        await made.drain(1.0)
    assert history.saved == ["done"]
