"""Reads which trajectories trained which steps, which were made from others, and which later steps go on from those steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import orjson
from sqlalchemy import Connection, or_, select

from offbook.base.types import Json, Message
from offbook.base.wire import TrainStatus, TrajectoryRecord
from offbook.engine import checkpoint_files
from offbook.server.models.checkpoints import scan_models
from offbook.server.records.claims import chunks
from offbook.server.records.tables import calls, outputs, trains, trajectories

Place = tuple[str, int]
"""A model and a step of it."""


def trained_steps(connection: Connection) -> dict[str, list[Place]]:
    """Trajectory -> the steps whose train requests had it, in the order of the requests."""
    rows = connection.execute(
        select(trains.c.status, trains.c.request).where(trains.c.state == "done").order_by(trains.c.created_at)
    )
    steps: dict[str, list[Place]] = {}
    for row in rows:
        status = TrainStatus.model_validate_json(row.status)
        if status.result is not None and status.result.applied:
            for name in ids_of(row.request):
                steps.setdefault(name, []).append((status.model, status.result.step))
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
    origins: dict[bytes, str] = {}
    for chunk in chunks(list(ids)):
        for body in connection.scalars(select(trajectories.c.body).where(trajectories.c.id.in_(chunk))):
            record = TrajectoryRecord.model_validate_json(body)
            for call in record.outside_calls:
                origins |= {_key((*call.messages, output.message)): record.id for output in call.outputs}
        rows = connection.execute(
            select(calls.c.trajectory_id, calls.c.body, outputs.c.message)
            .join(outputs, outputs.c.call_id == calls.c.id)
            .where(or_(calls.c.trajectory_id.in_(chunk), outputs.c.claimed_by.in_(chunk)))
        )
        for name, body, message in rows:
            origins[_key((*orjson.loads(body)["messages"], orjson.loads(message)))] = name
    if not origins:
        return
    with_histories = trajectories.c.body.contains('"histories":[{')
    for name, body in connection.execute(select(trajectories.c.id, trajectories.c.body).where(with_histories)):
        for history in orjson.loads(body)["histories"]:
            origin = origins.get(_key(history["messages"]))
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


def copied_steps(root: Path) -> dict[Place, Place]:
    """Each step in a server's directory that is a copy -> the step of another model that it is a copy of. Blocks.

    Raises StoreError if a file cannot be read."""
    origins: dict[Place, Place] = {}
    for folder, facts in scan_models(root):
        checkpoints = folder / "checkpoints"
        for step in checkpoint_files.steps(checkpoints):
            path = checkpoint_files.path_of(checkpoints, step)
            try:
                origin = checkpoint_files.read_note(path).forked_from
            except FileNotFoundError:
                continue  # deleted meanwhile
            except ValueError:
                continue  # damaged: the server puts it aside
            except OSError as error:
                raise checkpoint_files.not_checked(path, error) from error
            if origin is not None:
                origins[facts.name, step] = origin.model, origin.step
    return origins


def seen_since(places: Iterable[Place], origins: Mapping[Place, Place]) -> dict[str, int]:
    """By model, the first step that is one of `places` or goes on from one. `origins`: as `copied_steps`.

    >>> seen_since([("agent", 2)], {("fork", 3): ("agent", 3)})
    {'agent': 2, 'fork': 3}
    """
    first: dict[str, int] = {}
    waiting = list(places)
    while waiting:
        model, step = waiting.pop()
        if step < first.get(model, step + 1):
            first[model] = step
            waiting += [copy for copy, (name, number) in origins.items() if name == model and number >= step]
    return dict(sorted(first.items()))
