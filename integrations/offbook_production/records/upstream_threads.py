"""The threads of an app on a paid model: one finished trajectory each, to which calls are added, with limits of age and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, delete, func, select

from offbook.base.errors import OffbookError
from offbook.base.redaction import redacted_record
from offbook.base.types import CallTrace, RolloutPlace
from offbook.base.wire import TrajectoryRecord
from offbook.server.records.claims import chunks, finish
from offbook.server.records.tables import trajectories, trajectory_models


class ThreadCall(NamedTuple):
    """A call, the trajectory of its thread, the name of the thread, and the run that all threads of the app are in."""

    call: CallTrace
    run: str
    thread: str | None


class Retention(NamedTuple):
    """What of a run is kept: trajectories that ended since a time (unix seconds), of at most so many bytes."""

    run: str
    since: float
    max_bytes: float


def add_thread_calls(connection: Connection, batch: Sequence[ThreadCall]) -> list[OffbookError | None]:
    """Add each call to the trajectory of its thread, which is begun if it is new. A call that is there is not added again.

    Raises what refuses one of them; nothing of the batch is written then."""
    records: dict[str, TrajectoryRecord] = {}
    for chunk in chunks(sorted({thread_call.call.trajectory_id for thread_call in batch})):
        stored = select(trajectories.c.id, trajectories.c.body).where(trajectories.c.id.in_(chunk))
        records |= {name: TrajectoryRecord.model_validate_json(body) for name, body in connection.execute(stored)}
    changed: dict[str, TrajectoryRecord] = {}
    for thread_call in batch:
        name = thread_call.call.trajectory_id
        record = records.get(name) or _begun(thread_call)
        if all(known.id != thread_call.call.id for known in record.outside_calls):
            records[name] = changed[name] = _with_call(record, thread_call.call)
    if changed:
        [failure] = finish(connection, [tuple(redacted_record(record) for record in changed.values())])
        if isinstance(failure, OffbookError):
            raise failure
    return [None] * len(batch)


def _begun(first: ThreadCall) -> TrajectoryRecord:
    """The trajectory of a new thread, without its calls."""
    call = first.call
    return TrajectoryRecord(
        id=call.trajectory_id,
        model=call.model,
        calls=(),
        metadata={} if first.thread is None else {"thread_id": first.thread},
        started_at=call.started_at,
        ended_at=call.ended_at,
        place=RolloutPlace(run=first.run, split="traffic"),
    )


def _with_call(record: TrajectoryRecord, call: CallTrace) -> TrajectoryRecord:
    added = {"outside_calls": (*record.outside_calls, call), "ended_at": max(record.ended_at, call.ended_at)}
    return TrajectoryRecord.model_validate({**dict(record), **added})


def apply_retention(connection: Connection, batch: Sequence[Retention]) -> list[int | OffbookError]:
    """Delete the trajectories of each run that are too old, then the oldest until the rest is small enough. Results: numbers."""
    return [_forget(connection, retention) for retention in batch]


def _forget(connection: Connection, retention: Retention) -> int:
    size = func.length(trajectories.c.body)
    rows = connection.execute(
        select(trajectories.c.seq, trajectories.c.ended_at, size)
        .where(trajectories.c.run == retention.run)
        .order_by(trajectories.c.ended_at.desc())
    ).all()
    kept, going = 0, list[int]()
    for seq, ended_at, length in rows:
        kept += length
        if ended_at < retention.since or kept > retention.max_bytes:
            going.append(seq)
    for chunk in chunks(going):
        connection.execute(delete(trajectory_models).where(trajectory_models.c.seq.in_(chunk)))
        connection.execute(delete(trajectories).where(trajectories.c.seq.in_(chunk)))
    return len(going)
