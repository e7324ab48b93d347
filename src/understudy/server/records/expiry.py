"""Deletes calls that no trajectory claimed in time, and counts them per trajectory id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from sqlalchemy import Connection, delete, exists, insert, select, update

from ...errors import UnderstudyError
from .claims import chunks
from .tables import calls, expired, meta, outputs, trajectories

RUNNING = "running"
"""Key of the table `meta` for the text of RunningTime."""
Expiry = tuple[float, Collection[str]]
"""Calls that ended before this time (unix seconds) expire, except those of these trajectories, which are sampling."""


def expire(connection: Connection, batch: Sequence[Expiry]) -> list[int | UnderstudyError]:
    """Delete expired calls. Each result is the number of deleted calls.

    A call expires if all calls of its trajectory id ended before the time, that trajectory is not finished, and no
    trajectory claims one of the call's choices.
    """
    return [_expire(connection, before, in_flight) for before, in_flight in batch]


def save_running(connection: Connection, batch: Sequence[str]) -> list[UnderstudyError | None]:
    """Store the last of these texts of a RunningTime."""
    changed = connection.execute(update(meta).where(meta.c.key == RUNNING).values(value=batch[-1]))
    if not changed.rowcount:
        connection.execute(insert(meta).values(key=RUNNING, value=batch[-1]))
    return [None] * len(batch)


def read_running(connection: Connection) -> str | None:
    """The text that `save_running` stored; None before the first."""
    return connection.scalar(select(meta.c.value).where(meta.c.key == RUNNING))


def expired_of(connection: Connection, ids: Sequence[str]) -> dict[str, int]:
    """Number of expired calls per trajectory id; ids without expired calls are left out."""
    expired_calls: dict[str, int] = {}
    for chunk in chunks(ids):
        rows = connection.execute(
            select(expired.c.trajectory_id, expired.c.calls).where(expired.c.trajectory_id.in_(chunk))
        )
        expired_calls |= {trajectory_id: count for trajectory_id, count in rows}
    return expired_calls


def _expire(connection: Connection, before: float, in_flight: Collection[str]) -> int:
    newer = calls.alias("newer")
    claimed = select(outputs.c.call_id).where(outputs.c.claimed_by.is_not(None))
    old = select(calls.c.id, calls.c.trajectory_id).where(
        calls.c.ended_at < before,
        ~exists().where(trajectories.c.id == calls.c.trajectory_id),
        ~exists().where(newer.c.trajectory_id == calls.c.trajectory_id, newer.c.ended_at >= before),
        calls.c.id.not_in(claimed),
    )
    expiring = [(call_id, name) for call_id, name in connection.execute(old) if name not in in_flight]
    for chunk in chunks([call_id for call_id, _ in expiring]):
        connection.execute(delete(outputs).where(outputs.c.call_id.in_(chunk)))
        connection.execute(delete(calls).where(calls.c.id.in_(chunk)))
    _count_expired(connection, Counter(name for _, name in expiring))
    return len(expiring)


def _count_expired(connection: Connection, counts: Counter[str]) -> None:
    known = expired_of(connection, list(counts))
    for chunk in chunks(list(known)):
        connection.execute(delete(expired).where(expired.c.trajectory_id.in_(chunk)))
    if counts:
        rows = [{"trajectory_id": name, "calls": count + known.get(name, 0)} for name, count in counts.items()]
        connection.execute(insert(expired), rows)
