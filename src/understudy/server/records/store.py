"""The records: calls, finished trajectories, train requests and logs, in SQLite (WAL) or PostgreSQL.

The event loop awaits; one writer thread commits in groups, readers have connections of their own. A write that
returned survives a killed process; power loss may cost the last commits unless they are durable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, Row, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from ...errors import StoreError, UnderstudyError
from ...types import Call, Json
from ...wire import (
    LogRequest,
    TracePage,
    TrainStatus,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryRecord,
    TrajectoryWithCalls,
)
from .call_reading import WHOLE, read_calls, trace_page
from .call_rows import call_of, call_row, output_rows
from .claims import chunks, finish
from .database import engine_at
from .expiry import expire, expired_of, read_running, save_running
from .listing import page
from .schema import prepare
from .sqlite_file import check_file, mark_file
from .tables import calls, logs, outputs, trains, trajectories
from .writer import Writer, store_error

R = TypeVar("R")

log = logging.getLogger(__name__)

_READERS = 4
NewCall = tuple[Call, str | None]
"""A call and its idempotency key."""

_ADD_CALLS = insert(calls).values(late=sa.exists().where(trajectories.c.id == sa.bindparam("under")))
_ADD_OUTPUTS = insert(outputs)
"""What every call executes is built once. A call `under` a trajectory that is sealed is late."""


class Store:
    """All records of one server. Raises StoreError where records cannot be read or written."""

    def __init__(self, engine: Engine, where: str) -> None:
        self._engine = engine
        self._where = where
        self._writer = Writer(engine, where)
        self._readers = ThreadPoolExecutor(_READERS, "understudy-read")

    @classmethod
    async def open(cls, url: str, *, durable: bool = False) -> Store:
        """Open or make the records at a SQLAlchemy URL; `durable` as of `engine_at`. Records of an older version are migrated.
        Raises StoreError: unreachable, not ours, newer than us, or not migrated."""
        return await asyncio.to_thread(cls._opened, url, durable)

    @classmethod
    def _opened(cls, url: str, durable: bool) -> Store:
        engine, where = engine_at(url, _READERS + 1, durable=durable)
        try:
            if engine.dialect.name == "sqlite":
                check_file(Path(where))
            prepare(engine, where)
            if engine.dialect.name == "sqlite":
                mark_file(engine)
        except SQLAlchemyError as error:
            engine.dispose()
            raise store_error(error, "open", where) from error
        except StoreError:
            engine.dispose()
            raise
        return cls(engine, where)

    async def close(self) -> None:
        """Write what is queued, then let go of the database."""
        await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._engine.dispose)

    @property
    def where(self) -> str:
        """The database, as shown in messages: a path, or a URL without its password."""
        return self._where

    # ---- calls

    async def add_call(self, call: Call, idempotency_key: str | None = None) -> Call:
        """Record a call, as late when its trajectory is sealed; returns it once it is durable.

        With a key that its trajectory has already seen, nothing is written and the stored call is returned.
        """
        return await self._writer.write(_add_calls, (call, idempotency_key))

    async def call_with_key(self, trajectory_id: str, idempotency_key: str) -> Call | None:
        """The call that was recorded under the trajectory with this idempotency key."""
        return await self.read(lambda connection: _with_key(connection, trajectory_id, idempotency_key))

    async def calls_of(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[Call, ...]]:
        """The calls of each trajectory in order of start, with those of their choices that belong to it.

        Late calls are included and say so: they are never trained.
        """
        return await self.read(lambda connection: read_calls(connection, trajectory_ids, WHOLE))

    async def expire_unclaimed(self, before: float, in_flight: Collection[str] = ()) -> int:
        """Delete the calls of unfinished trajectories whose newest call ended before this time (unix seconds) and of
        which no trajectory claims a choice, but those of trajectories `in_flight`. Returns how many."""
        count = await self._writer.write(expire, (before, frozenset(in_flight)))
        if count:
            log.warning("%d recorded calls that no trajectory claimed have expired (--unclaimed-ttl)", count)
        return count

    async def expired(self, ids: Sequence[str]) -> dict[str, int]:
        """How many calls under each id have expired; ids without any are left out."""
        return await self.read(lambda connection: expired_of(connection, ids))

    async def running(self) -> str | None:
        """What `save_running` kept."""
        return await self.read(read_running)

    async def save_running(self, text: str) -> None:
        """Keep how long the server has run (RunningTime)."""
        await self._writer.write(save_running, text)

    # ---- trajectories

    async def finish(self, records: Sequence[TrajectoryRecord]) -> dict[str, int]:
        """Seal trajectories and claim their calls; recorded calls per trajectory id. All or nothing.

        Raises ApiError: 404 names unknown calls, 409 names the two trajectories that want one choice.
        """
        return await self._writer.write(finish, tuple(records))

    async def finished(self, ids: Sequence[str]) -> dict[str, TrajectoryRecord]:
        """Those of the trajectories that are finished."""
        return await self.read(lambda connection: finished(connection, ids))

    async def trajectories(self, query: TrajectoryQuery | None = None) -> TrajectoryPage:
        """A page of the finished trajectories that fit a query, all of them by default."""
        return await self.read(lambda connection: page(connection, query or TrajectoryQuery()))

    async def trajectory(self, trajectory_id: str) -> TrajectoryWithCalls | None:
        """One trajectory with its calls; None where nothing is known of it."""

        def read(connection: Connection) -> TrajectoryWithCalls | None:
            record = finished(connection, [trajectory_id]).get(trajectory_id)
            found = read_calls(connection, [trajectory_id], WHOLE)[trajectory_id]
            return TrajectoryWithCalls(trajectory=record, calls=found) if record is not None or found else None

        return await self.read(read)

    async def traces(self, query: TrajectoryQuery) -> TracePage:
        """A page of the finished trajectories that fit a query, with their calls but without token arrays."""
        return await self.read(lambda connection: trace_page(connection, query))

    # ---- train requests and logs

    async def save_train(self, status: TrainStatus, request_json: str) -> None:
        """Write a train request's state over what was known of it."""
        await self._writer.write(_save_trains, (status, request_json))

    async def train(self, request_id: str) -> TrainStatus | None:
        """The state of a train request."""
        rows = await self._rows(select(trains.c.status).where(trains.c.id == request_id))
        return TrainStatus.model_validate_json(rows[0].status) if rows else None

    async def train_request(self, request_id: str) -> str | None:
        """The request as it was saved, JSON."""
        rows = await self._rows(select(trains.c.request).where(trains.c.id == request_id))
        return rows[0].request if rows else None

    async def unfinished_trains(self) -> list[TrainStatus]:
        """Requests that are queued or running, oldest first."""
        query = select(trains.c.status).where(trains.c.state.in_(["queued", "running"])).order_by(trains.c.created_at)
        return [TrainStatus.model_validate_json(row.status) for row in await self._rows(query)]

    async def done_trains(self, limit: int) -> list[TrainStatus]:
        """The requests that were applied last, newest first."""
        query = select(trains.c.status).where(trains.c.state == "done").order_by(trains.c.created_at.desc())
        return [TrainStatus.model_validate_json(row.status) for row in await self._rows(query.limit(limit))]

    async def add_log(self, model: str, entry: LogRequest) -> None:
        """Keep metrics of the user's own."""
        await self._writer.write(_add_logs, (model, entry))

    async def logs(self, model: str) -> list[LogRequest]:
        """The user's metrics of a model, oldest first."""
        rows = await self._rows(select(logs.c.body).where(logs.c.model == model).order_by(logs.c.id))
        return [LogRequest.model_validate_json(row.body) for row in rows]

    # ---- reading

    async def _rows(self, query: sa.Select[Json]) -> Sequence[Row[Json]]:
        return await self.read(lambda connection: connection.execute(query).all())

    async def read(self, read: Callable[[Connection], R]) -> R:
        """What `read` makes of a connection, in a thread of the readers. Raises StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._reading, read)

    def _reading(self, read: Callable[[Connection], R]) -> R:
        try:
            with self._engine.connect() as connection:
                return read(connection)
        except SQLAlchemyError as error:
            raise store_error(error, "read", self._where) from error


# ---- writes: each takes a batch, see writer.Apply


def _add_calls(connection: Connection, batch: Sequence[NewCall]) -> list[Call | UnderstudyError]:
    known: dict[tuple[str, str], Call] = {}
    for call, key in batch:
        if key is not None and (found := _with_key(connection, call.trajectory_id, key)) is not None:
            known[call.trajectory_id, key] = found
    results: list[Call | UnderstudyError] = []
    new: list[NewCall] = []
    for call, key in batch:
        slot = (call.trajectory_id, key or "")
        if key is not None and slot in known:
            results.append(known[slot])
            continue
        if key is not None:
            known[slot] = call
        new.append((call, key))
        results.append(call)
    if new:
        connection.execute(_ADD_CALLS, [{**call_row(call, key), "under": call.trajectory_id} for call, key in new])
    choices = [row for call, _ in new for row in output_rows(call)]
    if choices:
        connection.execute(_ADD_OUTPUTS, choices)
    return results


def _save_trains(connection: Connection, batch: Sequence[tuple[TrainStatus, str]]) -> list[UnderstudyError | None]:
    for status, request in batch:
        row = {"model": status.model, "state": status.state, "status": status.model_dump_json(), "request": request}
        changed = connection.execute(update(trains).where(trains.c.id == status.id).values(row))
        if changed.rowcount == 0:
            connection.execute(insert(trains).values(row | {"id": status.id, "created_at": time.time()}))
    return [None] * len(batch)


def _add_logs(connection: Connection, batch: Sequence[tuple[str, LogRequest]]) -> list[UnderstudyError | None]:
    now = time.time()
    rows = [{"model": model, "created_at": now, "body": entry.model_dump_json()} for model, entry in batch]
    connection.execute(insert(logs), rows)
    return [None] * len(batch)


# ---- reads


def _with_key(connection: Connection, trajectory_id: str, key: str) -> Call | None:
    query = select(calls).where(calls.c.trajectory_id == trajectory_id, calls.c.idempotency_key == key)
    row = connection.execute(query).first()
    if row is None:
        return None
    return call_of(row, connection.execute(select(outputs).where(outputs.c.call_id == row.id)))


def finished(connection: Connection, ids: Sequence[str]) -> dict[str, TrajectoryRecord]:
    """Those of the trajectories that are finished."""
    found: dict[str, TrajectoryRecord] = {}
    for chunk in chunks(ids):
        rows = connection.execute(select(trajectories.c.id, trajectories.c.body).where(trajectories.c.id.in_(chunk)))
        found |= {row.id: TrajectoryRecord.model_validate_json(row.body) for row in rows}
    return found
