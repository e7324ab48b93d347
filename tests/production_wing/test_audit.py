"""The audit in both directions, and the removal of a user's data from everything in the server's directory."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import Engine, event

from offbook.base.config import TrainConfig
from offbook.base.types import CallTrace, RenderedHistory, RolloutPlace, TrainResult
from offbook.base.wire import GroupRecord, TrainRequest, TrainStatus, TrajectoryRecord
from offbook.commands.main import run
from offbook.engine import token_file
from offbook.engine.protocol import JobTrajectory, TrainJob, write_job
from offbook.engine.token_file import TokenFile, TokenHead, TrainedCall
from offbook.tracing.jsonl import JsonlSink, rollout_line
from offbook_production.audit import seen_since
from offbook_production.threads import trajectory_id
from offbook_production.wire import Removal, TrajectoryAudit

from .conftest import Opening, Passing

MARK = "mauve-7731"
"""A word that only the removed user has said."""


async def asked(route: Passing, path: str = "", /, **body: Any) -> httpx.Response:
    return await route.http.post(f"{route.url}/api/audit{path}", json=body)


async def trained(route: Passing, step: int, *ids: str, model: str = "default", **fields: Any) -> None:
    """A train request in the records, as the queue leaves it."""
    group = GroupRecord(trajectory_ids=ids, metadata={"explained": f"it says {MARK}"})
    request = TrainRequest(id=f"{model}-{step}", model=model, groups=(group,))
    result = TrainResult(model=model, step=step, request_id=request.id, applied=True, metrics={})
    status = TrainStatus(id=request.id, model=model, state="done", result=result).model_copy(update=fields)
    await route.services.store.save_train(status, request.model_dump_json())


async def test_a_thread_names_the_steps_it_trained(passing: Opening) -> None:
    async with passing() as route:
        for name in ("t-1", "t-1", "t-2"):
            await route.chat(thread=name)
        await route.gateway.traffic.settled()
        first, second = trajectory_id("desk", "t-1"), trajectory_id("desk", "t-2")
        await trained(route, 1, first, second)
        await trained(route, 2, second)
        unapplied = TrainResult(model="default", step=2, request_id="no", applied=False, reason="no_signal", metrics={})
        await trained(route, 3, first, result=unapplied)
        audits = (await asked(route, thread_ids=["t-1", "t-2"], route="desk")).json()
        assert [TrajectoryAudit.model_validate(one).trained for one in audits] == [
            ("default@1",),
            ("default@1", "default@2"),
        ]
        assert audits[0]["seen_since"] == {"default": 1}
        unknown = await asked(route, trajectory_ids=["nobody"])
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_trajectory")
        assert (await asked(route)).status_code == 400


def test_a_step_of_a_copy_has_seen_what_its_origin_has() -> None:
    origins = {("desk-learn-1", 4): ("desk", 4), ("desk", 5): ("desk-learn-1", 6)}
    assert seen_since([("desk-learn-1", 5)], origins) == {"desk": 5, "desk-learn-1": 5}
    assert seen_since([("a", 1)], {("a", 1): ("b", 1), ("b", 1): ("a", 1)}) == {"a": 1, "b": 1}


@pytest.fixture
def careless_sqlite() -> Iterator[None]:
    """SQLite as most systems have it. Debian's overwrites deleted rows by itself."""

    def configure(connection: Any, entry: object) -> None:
        del entry
        connection.execute("PRAGMA secure_delete=OFF")

    event.listen(Engine, "connect", configure)
    yield
    event.remove(Engine, "connect", configure)


@pytest.mark.usefixtures("careless_sqlite")
async def test_a_removed_thread_is_nowhere_in_the_directory(passing: Opening, tmp_path: Path) -> None:
    async with passing() as route:
        store, name = route.services.store, trajectory_id("desk", "t-1")
        for number in range(4):  # a row of many pages, which each call replaces
            await route.chat(f"I am {MARK}. {number} " * 1_000, thread="t-1")
        await route.chat("Where is box 1?", thread="t-2")
        await route.chat(f"It is {MARK} again", thread="t-1")
        await route.gateway.traffic.settled()
        about = {"thread_id": "t-1", "route": "desk", "score": 1, "comment": f"{MARK} is happy"}
        await route.http.post(f"{route.url}/api/feedback", json=about)
        rehearsed = {"model": "default", "messages": [{"role": "user", "content": f"I am {MARK}"}]}
        await route.http.post(
            f"{route.url}/v1/chat/completions", json=rehearsed, headers={"x-offbook-trajectory": "rehearsal"}
        )
        thread = (await store.finished([name]))[name]
        others = [
            TrajectoryRecord(
                id="rehearsal", model="default", started_at=1, ended_at=2, place=RolloutPlace(scenario=name)
            ),
            TrajectoryRecord(
                id="example", model="default", started_at=1, ended_at=2, histories=(told(thread.outside_calls[0]),)
            ),
        ]
        await store.finish(others)
        await trained(route, 1, name, "example")
        await trained(route, 2, "rehearsal")
        write_files(tmp_path, "rehearsal")
        [rollout] = [one for one in await route.threads() if one.record.id == name]
        sink = JsonlSink(tmp_path / "spans")
        sink._append("rollouts.jsonl", [rollout_line(rollout), {"id": "another"}])  # as `groups_finished` does
        marked = {path.name for path in having(tmp_path, MARK)}
        assert {"rollouts.jsonl", "job.json"} < marked and marked & {"records.db", "records.db-wal"}

        answer = await asked(route, "/removal", thread_ids=["t-1"], route="desk")
        removal = Removal.model_validate_json(answer.content)
        assert (removal.records, removal.calls, removal.files, removal.erased) == (3, 1, 3, True)
        [one] = removal.trajectories
        assert (set(one.derived), one.trained) == ({"rehearsal", "example"}, ("default@1", "default@2"))
        assert one.seen_since == {"default": 1}
        assert having(tmp_path, MARK) == having(tmp_path, '"t-1"') == []
        assert (tmp_path / "spans/rollouts.jsonl").read_text() == '{"id": "another"}\n'
        assert [path.name for path in (tmp_path / "p/models/default/tokens").iterdir()] == ["0002.safetensors"]
        assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["job-2"]
        assert [kept.record.metadata["thread_id"] for kept in await route.threads()] == ["t-2"]

        again = Removal.model_validate_json((await asked(route, "/removal", thread_ids=["t-1"], route="desk")).content)
        assert (again.records, again.trajectories[0].trained) == (0, ("default@1",))
    assert having(tmp_path, MARK) == []


async def test_the_commands_ask_and_forget(passing: Opening, capsys: pytest.CaptureFixture[str]) -> None:
    async with passing() as route:

        async def command(*words: str) -> tuple[int, str]:
            code = await asyncio.to_thread(run, [*words, "--url", route.url])
            captured = capsys.readouterr()
            return code, captured.out + captured.err

        await route.chat(thread="t-1")
        await route.gateway.traffic.settled()
        name = trajectory_id("desk", "t-1")
        await trained(route, 1, name)
        about = ("--thread", "t-1", "--route", "desk")
        code, text = await command("audit", *about)
        seen = "  trained default@1\n  in what was learned by default@1 and later\n"
        assert code == 0 and text == f"{name}: recorded\n{seen}"
        code, text = await command("forget", *about)
        assert code == 0 and text.startswith("deleted: 1 rollout with 0 sampled calls") and text.endswith(seen)
        for wrong in (("audit",), ("forget",)):
            code, text = await command(*wrong)
            assert code == 2 and "offbook: " in text


async def test_a_thread_is_not_removed_while_it_is_trained(passing: Opening, tmp_path: Path) -> None:
    async with passing() as route:
        await route.chat(MARK, thread="t-1")
        await route.gateway.traffic.settled()
        await trained(route, 1, trajectory_id("desk", "t-1"), state="running", result=None)
        refused = await asked(route, "/removal", thread_ids=["t-1"], route="desk")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "in_training")
        assert len(await route.threads()) == 1


async def test_a_removal_says_when_a_reader_keeps_rests_of_it(passing: Opening, tmp_path: Path) -> None:
    async with passing() as route:
        await route.chat(MARK, thread="t-1")
        await route.gateway.traffic.settled()
        reader = sqlite3.connect(tmp_path / "records.db")
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM trajectories").fetchone()
        first = Removal.model_validate_json((await asked(route, "/removal", thread_ids=["t-1"], route="desk")).content)
        assert (first.records, first.erased) == (1, False)
        reader.close()
        await trained(route, 1, trajectory_id("desk", "t-1"))
        again = Removal.model_validate_json((await asked(route, "/removal", thread_ids=["t-1"], route="desk")).content)
        assert again.erased
        assert having(tmp_path, MARK) == []


def told(call: CallTrace) -> RenderedHistory:
    """A call as a training example of an exported conversation."""
    answer = {"role": "assistant", "content": call.outputs[0].message["content"]}
    return RenderedHistory(messages=(*call.messages, answer), tools=None, targets=(len(call.messages),))


def write_files(root: Path, trajectory: str) -> None:
    """A token file and a job with the trajectory, and others without it."""
    for number, name in enumerate((trajectory, f"{trajectory}-2"), 1):
        write_job(
            root / "jobs" / f"job-{number}",
            TrainJob(MARK if name == trajectory else "r", "default", ((JobTrajectory(name, 1.0, ()),),), TrainConfig()),
        )
        call = TrainedCall(
            trajectory=name,
            call_id="c",
            index=0,
            step=0,
            prompt=1,
            offset=0,
            tokens=1,
            advantage=1.0,
            weight=1.0,
            constrained=None,
            leaf=0,
        )
        head = TokenHead(
            format=token_file.FORMAT,
            model="default",
            step=number,
            applied=True,
            request_id="r",
            loss="grpo",
            updates=1,
            created_at=time.time(),
            calls=(call,),
        )
        kinds = (np.int32, np.float32, np.float32, np.float16, np.float32, np.uint8, np.int32, np.int32)
        arrays: list[Any] = [np.ones(1, kind) for kind in kinds]
        token_file.write(root / "p/models/default/tokens", TokenFile(head, *arrays))


def having(root: Path, text: str) -> list[Path]:
    """The files of a directory with a text in their bytes."""
    return [path for path in root.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
