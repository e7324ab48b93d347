"""A removed thread is in no table; what trained on it keeps its ids."""

from __future__ import annotations

import sqlalchemy as sa

from offbook.base.config import TrainConfig
from offbook.base.types import CallStatus, CallTrace, OutputTrace, Sampling
from offbook.base.wire import GroupRecord, TrainRequest, TrainStatus
from offbook.server.records.store import Store
from offbook.server.records.tables import metadata
from offbook_production.feedback import Feedback, add_feedback
from offbook_production.removal import Removed, erase, remove
from offbook_production.takeover_threads import TakenThread, add_threads, read_threads, threads
from offbook_production.threads import ThreadCall, add_thread_calls
from offbook_production.wire import FeedbackRequest
from tests.server.records.test_store import a_call, a_record

MARK = "mauve-7731"


def passed(thread: str, text: str) -> ThreadCall:
    answer = OutputTrace(
        index=0, message={"content": text}, finish_reason="stop", status=CallStatus.COMPLETE,
        tokens=1, logprob_mean=None, logprob_min=None,
    )  # fmt: skip
    call = CallTrace(
        id=f"{thread}.call", trajectory_id=thread, model="openai/gpt-4.1", step=0, status=CallStatus.COMPLETE,
        sampling=Sampling(), messages=({"role": "user", "content": text},), tools=None,
        started_at=1, ended_at=2, prompt_tokens=3, outputs=(answer,),
    )  # fmt: skip
    return ThreadCall(call, "route/desk", f"{text} said {thread}")


async def rows_with(store: Store, text: str) -> list[str]:
    """The tables with a row that has a text."""

    def read(connection: sa.Connection) -> list[str]:
        names = sa.inspect(connection).get_table_names()
        tables = [table for table in (*metadata.sorted_tables, threads) if table.name in names]
        return [t.name for t in tables if any(text in str(tuple(row)) for row in connection.execute(sa.select(t)))]

    return await store.read(read)


async def test_nothing_of_a_removed_thread_is_left_in_any_table(store: Store) -> None:
    for thread in (passed("t-1", MARK), passed("t-2", "Where is box 1?")):
        await store.write(add_thread_calls, thread)
    own = a_call("t-1-again").model_copy(update={"messages": ({"role": "user", "content": MARK},)})
    await store.add_call(own)
    await store.finish([a_record("t-1-again", metadata={"told": MARK})])
    await store.add_tables(threads.metadata)
    await store.write(add_threads, [TakenThread(name, "takeover-1", 0, True, 1.0) for name in ("t-1", "t-2")])
    score = FeedbackRequest(trajectory_id="t-1", score=1.0, comment=f"{MARK} is happy")
    await store.write(add_feedback, Feedback(score, "t-1", 3.0))
    group = GroupRecord(trajectory_ids=("t-1", "t-2"), metadata={"explained": f"it says {MARK}"})
    request = TrainRequest(id="default-1", model="default", groups=(group,), config=TrainConfig())
    await store.save_train(TrainStatus(id=request.id, model="default", state="failed"), request.model_dump_json())
    assert set(await rows_with(store, MARK)) == {"calls", "trajectories", "trains"}

    assert await store.write(remove, ("t-1", "t-1-again")) == Removed(2, 1)
    assert await store.alone(erase)
    assert await rows_with(store, MARK) == []
    assert await rows_with(store, "t-1") == ["trains"]  # for the audit
    taken = await store.read(lambda connection: read_threads(connection, "takeover-1"))
    assert [row.id for row, _ in taken] == ["t-2"]
    assert await store.write(remove, ("t-1",)) == Removed(0, 0)
