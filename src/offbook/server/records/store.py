"""The store of all records: calls, finished trajectories, train requests and logs, in SQLite (WAL).

One writer thread commits writes in groups; reader threads have their own connections; the event loop never waits for the
database. A completed write survives a killed process. A power loss can undo the last commits, unless the store is durable. Calls
that no trajectory claims in time are deleted, and counted per trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    MetaData,
    Row,
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from offbook.base import clock
from offbook.base.errors import OffbookError, StoreError
from offbook.base.types import Call, Json, Message
from offbook.base.wire import (
    LogRequest,
    TracePage,
    TrainStatus,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryRecord,
    TrajectoryWithCalls,
)

from .call_rows import WHOLE, call_of, call_row, output_rows, read_calls, trace_page
from .claims import Finish, chunks, finish
from .database import APPLICATION_ID, check_file, engine_at
from .listing import page
from .overview import model_logs
from .tables import SCHEMA, calls, expired, logs, outputs, prepare, trains, trajectories
from .writer import Apply, Writer, store_error

logger = logging.getLogger(__name__)

Expiry = tuple[float, Collection[str]]
"""Calls that ended before this time (unix seconds) expire, except those of these trajectories, which are sampling."""


def create_file(path: Path) -> None:
    """Create empty records that only this account can read. Raises OSError, StoreError."""
    path.touch(0o600, exist_ok=False)
    engine = engine_at(path, 1)
    try:
        prepare(engine, path)
        _mark_file(engine)
    except SQLAlchemyError as error:
        raise store_error(error, "create", path) from error
    finally:
        engine.dispose()


def _mark_file(engine: Engine) -> None:
    with engine.begin() as connection:
        if connection.exec_driver_sql("PRAGMA application_id").scalar() != APPLICATION_ID:
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        if connection.exec_driver_sql("PRAGMA user_version").scalar() != SCHEMA:
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")


def expire(connection: Connection, batch: Sequence[Expiry]) -> list[int | OffbookError]:
    """Delete expired calls. Each result is the number of deleted calls.

    A call expires if all calls of its trajectory id ended before the time, that trajectory is not finished, and no
    trajectory claims one of the call's choices.
    """
    return [_expire(connection, before, in_flight) for before, in_flight in batch]


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


A = TypeVar("A")
R = TypeVar("R")

_READERS = 4
NewCall = tuple[Call, str | None]
"""A call and its idempotency key."""

_ADD_CALLS = insert(calls).values(late=exists().where(trajectories.c.id == bindparam("under")))
_ADD_OUTPUTS = insert(outputs)
"""Built once, because every call needs them. A call is late if its trajectory (`under`) is finished already."""

BeforeFinish: TypeAlias = Callable[[Connection, Finish], Finish]
"""Changes trajectories that are about to be finished, in the same transaction."""


class Store:
    """All records of one server. Every method raises StoreError if the database cannot be read or written."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self._file = file
        self._writer = Writer(engine, file)
        self.before_finish: list[BeforeFinish] = []
        self._finish = partial(_finish, self.before_finish)
        self._readers = ThreadPoolExecutor(_READERS, "offbook-read")

    @classmethod
    async def open(cls, file: Path, *, durable: bool = False, may_begin: bool = False) -> Store:
        """Open or create the records in a file.

        The clock of this process goes on from the newest call and train request, so that later ones sort after them also
        if the system clock was set back. `durable`: see `engine_at`. `may_begin`: see `check_file`. Raises StoreError if the
        file cannot be opened, belongs to another program, or has another schema.
        """
        return await asyncio.to_thread(cls._opened, file, durable, may_begin)

    @classmethod
    def _opened(cls, file: Path, durable: bool, may_begin: bool) -> Store:
        check_file(file, may_begin=may_begin)
        engine = engine_at(file, _READERS + 1, durable=durable)
        try:
            prepare(engine, file)
            _mark_file(engine)
            with engine.connect() as connection:
                _continue_clock(connection, file)
        except SQLAlchemyError as error:
            engine.dispose()
            raise store_error(error, "open", file) from error
        except StoreError:
            engine.dispose()
            raise
        return cls(engine, file)

    async def close(self) -> None:
        """Complete queued writes, then close all connections."""
        await asyncio.to_thread(self._writer.close)
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._engine.dispose)

    async def add_call(self, call: Call, idempotency_key: str | None = None) -> Call:
        """Record a call, and return it after the commit. A call whose trajectory is finished already is recorded as late.

        If a call of the trajectory has this idempotency key already, writes nothing and returns that call.
        """
        return await self._writer.write(_add_calls, (call, idempotency_key))

    async def call_with_key(self, trajectory_id: str, idempotency_key: str) -> Call | None:
        """The trajectory's call with this idempotency key; None if there is none."""
        return await self.read(lambda connection: _with_key(connection, trajectory_id, idempotency_key))

    async def call(self, call_id: str) -> Call | None:
        """One call with all its choices, whichever trajectory has them; None if there is none with this id."""
        return await self.read(lambda connection: _first(connection, calls.c.id == call_id))

    async def sampled_messages(self, trajectory_id: str) -> list[Message]:
        """The answers that were recorded under a trajectory id, in order of start. Token arrays are not read."""
        query = select(outputs.c.message).join(calls, calls.c.id == outputs.c.call_id)
        query = query.where(calls.c.trajectory_id == trajectory_id).order_by(calls.c.started_at, outputs.c.choice)
        return [orjson.loads(row.message) for row in await self._rows(query)]

    async def calls_of(self, trajectory_ids: Sequence[str]) -> dict[str, tuple[Call, ...]]:
        """The calls of each trajectory in order of start, each with only the choices that belong to the trajectory.

        Late calls are included, with `late` set. They are never trained.
        """
        return await self.read(lambda connection: read_calls(connection, trajectory_ids, WHOLE))

    async def expire_unclaimed(self, before: float, in_flight: Collection[str] = ()) -> int:
        """Delete calls that no trajectory claimed, and return their number.

        A call expires if all calls of its trajectory id ended before this time (unix seconds), that trajectory is neither
        finished nor `in_flight`, and no trajectory claims one of the call's choices.
        """
        count = await self._writer.write(expire, (before, frozenset(in_flight)))
        if count:
            logger.warning("Deleted %d recorded calls that no trajectory claimed in time (--unclaimed-ttl)", count)
        return count

    async def expired(self, ids: Sequence[str]) -> dict[str, int]:
        """Number of expired calls per trajectory id; ids without expired calls are left out."""
        return await self.read(lambda connection: expired_of(connection, ids))

    async def finish(self, records: Sequence[TrajectoryRecord]) -> dict[str, int]:
        """Finish trajectories and claim their calls in one transaction. Returns the number of calls per trajectory id.
        `before_finish` may change them before.

        Raises ApiError, and writes nothing: 404 for unknown calls, 409 if two trajectories claim one choice.
        """
        return await self._writer.write(self._finish, tuple(records))

    async def finished(self, ids: Sequence[str]) -> dict[str, TrajectoryRecord]:
        """The finished ones of these trajectories, by id."""
        return await self.read(lambda connection: finished(connection, ids))

    async def trajectories(self, query: TrajectoryQuery | None = None) -> TrajectoryPage:
        """A page of the finished trajectories that match a query; without a query, of all."""
        return await self.read(lambda connection: page(connection, query or TrajectoryQuery()))

    async def trajectory(self, trajectory_id: str) -> TrajectoryWithCalls | None:
        """One trajectory, finished or not, with its calls; None if there is neither a record nor a call."""
        return await self.read(lambda connection: recorded_trajectory(connection, trajectory_id))

    async def traces(self, query: TrajectoryQuery) -> TracePage:
        """Like `trajectories`, with the calls of each trajectory but without token ids."""
        return await self.read(lambda connection: trace_page(connection, query))

    async def save_train(self, status: TrainStatus, request_json: str) -> None:
        """Store a train request, replacing its earlier state."""
        await self._writer.write(_save_trains, (status, request_json))

    async def train(self, request_id: str) -> TrainStatus | None:
        """The state of a train request; None if it is unknown."""
        rows = await self._rows(select(trains.c.status).where(trains.c.id == request_id))
        return TrainStatus.model_validate_json(rows[0].status) if rows else None

    async def train_request(self, request_id: str) -> str | None:
        """The JSON of a stored request; None if it is unknown."""
        rows = await self._rows(select(trains.c.request).where(trains.c.id == request_id))
        return rows[0].request if rows else None

    async def unfinished_trains(self) -> list[TrainStatus]:
        """Queued and running requests, oldest first."""
        query = select(trains.c.status).where(trains.c.state.in_(["queued", "running"])).order_by(trains.c.created_at)
        return [TrainStatus.model_validate_json(row.status) for row in await self._rows(query)]

    async def done_trains(self, limit: int) -> list[TrainStatus]:
        """The last `limit` requests that are done, newest first."""
        query = select(trains.c.status).where(trains.c.state == "done").order_by(trains.c.created_at.desc())
        return [TrainStatus.model_validate_json(row.status) for row in await self._rows(query.limit(limit))]

    async def add_log(self, model: str, entry: LogRequest) -> None:
        """Store metrics that the user logged for a model."""
        await self._writer.write(_add_logs, (model, entry))

    async def logs(self, model: str) -> list[LogRequest]:
        """The metrics that the user logged for a model, oldest first."""
        return await self.read(partial(model_logs, model=model))

    async def _rows(self, query: Select[Json]) -> Sequence[Row[Json]]:
        return await self.read(lambda connection: connection.execute(query).all())

    async def write(self, apply: Apply[A, R], argument: A) -> R:
        """See `Writer.write`: for the records of a room of its own. Raises StoreError."""
        return await self._writer.write(apply, argument)

    async def add_tables(self, tables: MetaData) -> None:
        """Create tables beside the records' own, if they are missing."""
        await self._writer.write(_add_tables, tables)

    async def alone(self, work: Callable[[Engine], R]) -> R:
        """See `Writer.alone`. Raises StoreError."""
        return await self._writer.alone(work)

    async def read(self, read: Callable[[Connection], R]) -> R:
        """Call `read` with a connection in a reader thread, and return its result. Raises StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._reading, read)

    def _reading(self, read: Callable[[Connection], R]) -> R:
        try:
            with self._engine.connect() as connection:
                return read(connection)
        except SQLAlchemyError as error:
            raise store_error(error, "read", self._file) from error


def _add_calls(connection: Connection, batch: Sequence[NewCall]) -> list[Call | OffbookError]:
    known: dict[tuple[str, str], Call] = {}
    for call, key in batch:
        if key is not None and (earlier := _with_key(connection, call.trajectory_id, key)) is not None:
            known[call.trajectory_id, key] = earlier
    results: list[Call | OffbookError] = []
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


def _save_trains(connection: Connection, batch: Sequence[tuple[TrainStatus, str]]) -> list[OffbookError | None]:
    for status, request in batch:
        row = {"model": status.model, "state": status.state, "status": status.model_dump_json(), "request": request}
        changed = connection.execute(update(trains).where(trains.c.id == status.id).values(row))
        if changed.rowcount == 0:
            connection.execute(insert(trains).values(row | {"id": status.id, "created_at": clock.now()}))
    return [None] * len(batch)


def _continue_clock(connection: Connection, file: Path) -> None:
    newest = [connection.scalar(select(func.max(column))) for column in (calls.c.started_at, trains.c.created_at)]
    behind = clock.advance(max((moment for moment in newest if moment is not None), default=0.0))
    if behind > clock.JUMP_SECONDS:
        logger.warning(
            "The system clock is %.0f s behind the newest record in %s: new records get times from there on, to stay in order. "
            "If the clock is right, it was wrong before",
            *(behind, file),
        )


def _finish(
    before: Sequence[BeforeFinish], connection: Connection, batch: Sequence[Finish]
) -> list[dict[str, int] | OffbookError]:
    results: list[dict[str, int] | OffbookError] = []
    for records in batch:
        for change in before:
            records = change(connection, records)
        results += finish(connection, [records])
    return results


def _add_tables(connection: Connection, batch: Sequence[MetaData]) -> list[OffbookError | None]:
    for tables in batch:
        tables.create_all(connection)
    return [None] * len(batch)


def _add_logs(connection: Connection, batch: Sequence[tuple[str, LogRequest]]) -> list[OffbookError | None]:
    now = clock.now()
    for model, entry in batch:
        if entry.id is None or not _has_log(connection, model, entry.id):
            connection.execute(insert(logs).values(model=model, created_at=now, body=entry.model_dump_json()))
    return [None] * len(batch)


def _has_log(connection: Connection, model: str, entry_id: str) -> bool:
    similar = select(logs.c.body).where(logs.c.model == model, logs.c.body.contains(f'"{entry_id}"', autoescape=True))
    return any(LogRequest.model_validate_json(row.body).id == entry_id for row in connection.execute(similar))


def _with_key(connection: Connection, trajectory_id: str, key: str) -> Call | None:
    return _first(connection, (calls.c.trajectory_id == trajectory_id) & (calls.c.idempotency_key == key))


def _first(connection: Connection, condition: ColumnElement[bool]) -> Call | None:
    row = connection.execute(select(calls).where(condition)).first()
    if row is None:
        return None
    return call_of(row, connection.execute(select(outputs).where(outputs.c.call_id == row.id)))


def finished(connection: Connection, ids: Sequence[str]) -> dict[str, TrajectoryRecord]:
    """The finished ones of these trajectories, by id."""
    records: dict[str, TrajectoryRecord] = {}
    for chunk in chunks(ids):
        rows = connection.execute(select(trajectories.c.id, trajectories.c.body).where(trajectories.c.id.in_(chunk)))
        records |= {row.id: TrajectoryRecord.model_validate_json(row.body) for row in rows}
    return records


def recorded_trajectory(connection: Connection, trajectory_id: str) -> TrajectoryWithCalls | None:
    """One trajectory, finished or not, with its calls and their tokens; None if there is neither a record nor a call."""
    record = finished(connection, [trajectory_id]).get(trajectory_id)
    calls = read_calls(connection, [trajectory_id], WHOLE)[trajectory_id]
    return TrajectoryWithCalls(trajectory=record, calls=calls) if record is not None or calls else None
