"""Reads which trajectories a train request had, and which trajectories were made from others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import orjson
from sqlalchemy import Connection, or_, select

from offbook.base.types import Json, Message
from offbook.base.wire import TrainStatus, TrajectoryRecord
from offbook.server.records.claims import chunks
from offbook.server.records.tables import calls, outputs, trains, trajectories

from ..audits import AuditedTrajectory


@dataclass(frozen=True)
class TrainedStep:
    """A step that a train request made, and the request's trajectories."""

    model: str
    step: int
    request_id: str
    trajectory_ids: tuple[str, ...]


def trained_steps(connection: Connection) -> list[TrainedStep]:
    """The steps that train requests made, in the order of the requests."""
    rows = connection.execute(
        select(trains.c.status, trains.c.request).where(trains.c.state == "done").order_by(trains.c.created_at)
    )
    steps: list[TrainedStep] = []
    for row in rows:
        status = TrainStatus.model_validate_json(row.status)
        if status.result is not None and status.result.applied:
            steps.append(TrainedStep(status.model, status.result.step, status.id, ids_of(row.request)))
    return steps


def ids_of(request: str) -> tuple[str, ...]:
    """The trajectories of a stored train request, the replayed ones too; () if none is stored."""
    if not request:
        return ()
    stored: dict[str, Json] = orjson.loads(request)
    groups: Sequence[Json] = stored["groups"]
    named = [*(group["trajectory_ids"] for group in groups), stored.get("replayed", ())]
    return tuple(str(name) for names in named for name in names)


def is_recorded(connection: Connection, ids: Sequence[str]) -> set[str]:
    """Those of these trajectories that are finished or have a call."""
    known: set[str] = set()
    for chunk in chunks(ids):
        known |= set(connection.scalars(select(trajectories.c.id).where(trajectories.c.id.in_(chunk))))
        known |= set(connection.scalars(select(calls.c.trajectory_id).where(calls.c.trajectory_id.in_(chunk))))
    return known


def audited(connection: Connection, ids: Sequence[str]) -> list[AuditedTrajectory]:
    """These trajectories with the calls that they claim, and those of other LLMs."""
    claimed: dict[str, dict[str, None]] = {}
    known: dict[str, TrajectoryRecord] = {}
    for chunk in chunks(ids):
        for body in connection.scalars(select(trajectories.c.body).where(trajectories.c.id.in_(chunk))):
            record = TrajectoryRecord.model_validate_json(body)
            known[record.id] = record
        rows = connection.execute(
            select(outputs.c.claimed_by, outputs.c.call_id)
            .join(calls, calls.c.id == outputs.c.call_id)
            .where(outputs.c.claimed_by.in_(chunk))
            .order_by(calls.c.started_at, calls.c.id)
        )
        for name, call_id in rows:
            claimed.setdefault(name, {})[call_id] = None
    return [_audited(name, known.get(name), tuple(claimed.get(name, ()))) for name in ids]


def _audited(name: str, record: TrajectoryRecord | None, own: tuple[str, ...]) -> AuditedTrajectory:
    if record is None:
        return AuditedTrajectory(id=name, recorded=False)
    thread = record.metadata.get("thread_id")
    return AuditedTrajectory(
        id=name,
        thread_id=None if thread is None else str(thread),
        run=record.place.run,
        calls=(*own, *(call.id for call in record.outside_calls)),
    )


def derived(connection: Connection, ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each of these trajectories, those that were made from it: runs of a scenario that has its id, and examples with a
    conversation of it. Those that claim one of its calls count too."""
    results: dict[str, dict[str, None]] = {name: {} for name in ids}
    for chunk in chunks(ids):
        by_scenario = select(trajectories.c.scenario, trajectories.c.id).where(trajectories.c.scenario.in_(chunk))
        by_call = (
            select(calls.c.trajectory_id, outputs.c.claimed_by)
            .join(outputs, outputs.c.call_id == calls.c.id)
            .where(calls.c.trajectory_id.in_(chunk), outputs.c.claimed_by.is_not(None))
        )
        for query in (by_scenario, by_call):
            for origin, name in connection.execute(query):
                if name != origin:
                    results[origin][name] = None
    for origin, name in _copies(connection, ids):
        results[origin][name] = None
    return {origin: tuple(names) for origin, names in results.items()}


def _copies(connection: Connection, ids: Collection[str]) -> Iterator[tuple[str, str]]:
    """Pairs of a trajectory and an example that has one of its conversations."""
    told: dict[bytes, str] = {}
    for chunk in chunks(list(ids)):
        for body in connection.scalars(select(trajectories.c.body).where(trajectories.c.id.in_(chunk))):
            record = TrajectoryRecord.model_validate_json(body)
            for call in record.outside_calls:
                told |= {_key((*call.messages, output.message)): record.id for output in call.outputs}
        rows = connection.execute(
            select(calls.c.trajectory_id, calls.c.body, outputs.c.message)
            .join(outputs, outputs.c.call_id == calls.c.id)
            .where(or_(calls.c.trajectory_id.in_(chunk), outputs.c.claimed_by.in_(chunk)))
        )
        for name, body, message in rows:
            told[_key((*orjson.loads(body)["messages"], orjson.loads(message)))] = name
    if not told:
        return
    with_histories = trajectories.c.body.contains('"histories":[{')
    for name, body in connection.execute(select(trajectories.c.id, trajectories.c.body).where(with_histories)):
        for history in orjson.loads(body)["histories"]:
            origin = told.get(_key(history["messages"]))
            if origin in ids and name != origin:
                yield cast(str, origin), name


def _key(messages: Sequence[Message]) -> bytes:
    """What is said in a conversation. Fields that an export leaves out or adds do not count."""
    spoken = [
        [
            message.get("role"),
            message.get("content") or "",
            [call.get("function") for call in message.get("tool_calls") or ()],
        ]
        for message in messages
    ]
    return orjson.dumps(spoken, option=orjson.OPT_SORT_KEYS)
