"""Deletes trajectories with their calls, and what the database file still holds of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, Engine, delete, or_, select, update

from offbook.base.errors import OffbookError
from offbook.base.types import Json
from offbook.server.errors import ApiError
from offbook.server.records.claims import chunks
from offbook.server.records.tables import calls, expired, outputs, trains, trajectories, trajectory_models

from .audit import ids_of
from .takeover_threads import threads

logger = logging.getLogger(__name__)


class Removed(NamedTuple):
    """Numbers of deleted trajectories and calls."""

    trajectories: int
    calls: int


def remove(connection: Connection, batch: Sequence[tuple[str, ...]]) -> list[Removed | OffbookError]:
    """Delete these trajectories, finished or not, and their calls. What a train request says of their groups is emptied; the
    ids stay, so that the audit can still be asked.

    409 if a train request that has one of them is not applied yet."""
    results: list[Removed | OffbookError] = []
    for ids in batch:
        try:
            _empty_requests(connection, set(ids))
        except ApiError as refusal:
            results.append(refusal)
            continue
        results.append(_remove(connection, ids))
    return results


def _remove(connection: Connection, ids: Sequence[str]) -> Removed:
    records = count = 0
    for chunk in chunks(ids):
        claimed = select(outputs.c.call_id).where(outputs.c.claimed_by.in_(chunk))
        own = connection.scalars(
            select(calls.c.id).where(or_(calls.c.trajectory_id.in_(chunk), calls.c.id.in_(claimed)))
        ).all()
        for part in chunks(own):
            connection.execute(delete(outputs).where(outputs.c.call_id.in_(part)))
            count += connection.execute(delete(calls).where(calls.c.id.in_(part))).rowcount
        listed = select(trajectories.c.seq).where(trajectories.c.id.in_(chunk))
        connection.execute(delete(trajectory_models).where(trajectory_models.c.seq.in_(listed)))
        records += connection.execute(delete(trajectories).where(trajectories.c.id.in_(chunk))).rowcount
        connection.execute(delete(expired).where(expired.c.trajectory_id.in_(chunk)))
        connection.execute(delete(threads).where(threads.c.id.in_(chunk)))
    return Removed(records, count)


def _empty_requests(connection: Connection, ids: set[str]) -> None:
    """Empty the metadata and metrics of the groups that have one of these trajectories."""
    for row in connection.execute(select(trains.c.id, trains.c.state, trains.c.request)).all():
        if not ids.intersection(ids_of(row.request)):
            continue
        if row.state in ("queued", "running"):
            raise ApiError(
                409,
                f"train request {row.id!r} has one of these trajectories and is {row.state}: remove them when it has ended",
                "trajectory_ids",
                "in_training",
            )
        request: dict[str, Json] = orjson.loads(row.request)
        for group in request["groups"]:
            if ids.intersection(group["trajectory_ids"]):
                group |= {"metadata": {}, "metrics": {}}
        connection.execute(update(trains).where(trains.c.id == row.id).values(request=orjson.dumps(request).decode()))


def erase(engine: Engine) -> bool:
    """Rewrite a SQLite file without the rests of deleted rows, and empty its log. Returns False if a reader holds the log.
    Raises SQLAlchemyError."""
    with engine.connect() as connection:
        cursor = connection.connection.cursor()
        try:
            cursor.execute("VACUUM")
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            busy, *_ = cursor.fetchone() or (1,)
        finally:
            cursor.close()
    return not busy
