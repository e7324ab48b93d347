"""The threads of an app on a paid model: which one a call belongs to, its id and share, and what is recorded of it.

A recorded thread is one finished trajectory, to which calls are added, with limits of age and size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import orjson
from sqlalchemy import Connection, delete, func, select

from offbook.base.errors import OffbookError
from offbook.base.redaction import redacted_record
from offbook.base.types import CallTrace, Json, RolloutPlace
from offbook.base.wire import THREAD_HEADER, TrajectoryRecord
from offbook.server.records.claims import chunks, finish
from offbook.server.records.tables import trajectories, trajectory_models


def thread_of(headers: Mapping[str, str], body: bytes) -> str | None:
    """The app's own name of a thread: the header `x-offbook-thread`, else `metadata.thread_id` of the body; None without."""
    if named := headers.get(THREAD_HEADER):
        return named
    if b'"thread_id"' not in body:  # most requests have none, and need not be parsed
        return None
    try:
        request: Json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    metadata = _field(request, "metadata")
    value = _field(metadata, "thread_id")
    return str(value) if isinstance(value, str | int) and str(value) else None


def _field(value: Json, name: str) -> Json:
    return cast(dict[str, Json], value).get(name) if isinstance(value, dict) else None


def trajectory_id(route: str, thread: str) -> str:
    """The id of the trajectory that has a thread's calls. It does not reveal the thread's name."""
    return f"thread-{_digest('trajectory', route, thread).hex()[:32]}"


def position(salt: str, route: str, thread: str) -> float:
    """A number in [0, 1), uniform over threads and always the same for one: a thread stays on its side of any share."""
    return int.from_bytes(_digest(salt, route, thread)[:8]) / 2**64


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).digest()


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
    return [_delete_old(connection, retention) for retention in batch]


def _delete_old(connection: Connection, retention: Retention) -> int:
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
