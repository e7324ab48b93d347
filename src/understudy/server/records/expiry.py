"""Calls that no trajectory claimed in time: deleted, with a note of how many there were under each id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy import Connection, delete, insert, select, update

from ...errors import UnderstudyError
from .claims import chunks
from .tables import calls, expired, meta, outputs, trajectories

RUNNING = "running"
"""Key of `meta`: the text of RunningTime."""
Expiry = tuple[float, Collection[str]]
"""Calls that ended before this time (unix seconds), but none of these trajectories, whose calls are being sampled."""


def expire(connection: Connection, batch: Sequence[Expiry]) -> list[int | UnderstudyError]:
    """How many calls each expiry deleted."""
    return [_expire(connection, before, in_flight) for before, in_flight in batch]


def save_running(connection: Connection, batch: Sequence[str]) -> list[UnderstudyError | None]:
    """Keep the newest text of a RunningTime."""
    changed = connection.execute(update(meta).where(meta.c.key == RUNNING).values(value=batch[-1]))
    if not changed.rowcount:
        connection.execute(insert(meta).values(key=RUNNING, value=batch[-1]))
    return [None] * len(batch)


def read_running(connection: Connection) -> str | None:
    """The text that was kept last."""
    return connection.scalar(select(meta.c.value).where(meta.c.key == RUNNING))


def expired_of(connection: Connection, ids: Sequence[str]) -> dict[str, int]:
    """How many calls under each id have expired; ids without any are left out."""
    found: dict[str, int] = {}
    for chunk in chunks(ids):
        rows = connection.execute(
            select(expired.c.trajectory_id, expired.c.calls).where(expired.c.trajectory_id.in_(chunk))
        )
        found |= {trajectory_id: count for trajectory_id, count in rows}
    return found


def _expire(connection: Connection, before: float, in_flight: Collection[str]) -> int:
    newer = calls.alias("newer")
    claimed = select(outputs.c.call_id).where(outputs.c.claimed_by.is_not(None))
    old = select(calls.c.id, calls.c.trajectory_id).where(
        calls.c.ended_at < before,
        ~sa.exists().where(trajectories.c.id == calls.c.trajectory_id),
        ~sa.exists().where(newer.c.trajectory_id == calls.c.trajectory_id, newer.c.ended_at >= before),
        calls.c.id.not_in(claimed),
    )
    gone = [(call_id, name) for call_id, name in connection.execute(old) if name not in in_flight]
    for chunk in chunks([call_id for call_id, _ in gone]):
        connection.execute(delete(outputs).where(outputs.c.call_id.in_(chunk)))
        connection.execute(delete(calls).where(calls.c.id.in_(chunk)))
    _note(connection, Counter(name for _, name in gone))
    return len(gone)


def _note(connection: Connection, counts: Counter[str]) -> None:
    known = expired_of(connection, list(counts))
    for chunk in chunks(list(known)):
        connection.execute(delete(expired).where(expired.c.trajectory_id.in_(chunk)))
    if counts:
        rows = [{"trajectory_id": name, "calls": count + known.get(name, 0)} for name, count in counts.items()]
        connection.execute(insert(expired), rows)
