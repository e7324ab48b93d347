"""Migrates schema 1 to 2, which stores the place of each trajectory and every model that it called.

Reads rows and JSON as schema 1 wrote them, independently of today's types. The values of old trajectories come from:

* models and step: their calls
* group, index and split: train requests, or the split from logs
* scenario: metadata
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count

import orjson
from sqlalchemy import Boolean, Connection, Double, Row, String, column, insert, select, table, text

from ...types import Json
from .claims import called, chunks
from .tables import logs, trains, trajectories, trajectory_models

Place = dict[str, Json]
"""The known fields of a RolloutPlace."""

_NAMES = ("run", "split", "step", "scenario", "group", "index")
_LONGEST = 500  # characters of a scenario's id
_OLD = table(
    "trajectories_1",
    *(column(name, String) for name in ("id", "model", "body")),
    *(column(name, Double) for name in ("reward", "ended_at")),
    column("explicit", Boolean),
)


def migrate_1_to_2(connection: Connection) -> None:
    """Migrate in the connection's transaction."""
    connection.execute(text("ALTER TABLE trajectories RENAME TO trajectories_1"))
    trajectories.create(connection)
    trajectory_models.create(connection)
    ids = list(connection.scalars(select(_OLD.c.id).order_by(_OLD.c.ended_at, _OLD.c.id)))
    seqs = dict(zip(ids, count(1)))
    places, models = _trained(connection)
    _add_logged(connection, places, models)
    for chunk in chunks(ids):
        _add_called(connection, chunk, places, models)
    _share_steps(places)
    for chunk in chunks(ids):
        rows = connection.execute(select(_OLD).where(_OLD.c.id.in_(chunk))).all()
        connection.execute(insert(trajectories), [_row(row, seqs[row.id], places[row.id]) for row in rows])
        pairs = [
            {"seq": seqs[trajectory_id], "model": model}
            for trajectory_id in chunk
            for model in sorted(models[trajectory_id])
        ]
        connection.execute(insert(trajectory_models), pairs)
    connection.execute(text("DROP TABLE trajectories_1"))


def _trained(connection: Connection) -> tuple[defaultdict[str, Place], defaultdict[str, set[str]]]:
    """Places and trained models of the trajectories in train requests. The first request with a trajectory sets its place."""
    places = defaultdict[str, Place](dict)
    models = defaultdict[str, set[str]](set)
    for row in connection.execute(select(trains.c.id, trains.c.model, trains.c.request).order_by(trains.c.created_at)):
        for group_index, group in enumerate(orjson.loads(row.request).get("groups", ())):
            scenario = _scenario(group.get("metadata", {}))
            for index, trajectory_id in enumerate(group["trajectory_ids"]):
                models[trajectory_id].add(row.model)
                if trajectory_id not in places:
                    places[trajectory_id] = {
                        "split": "train",
                        "group": f"{row.id}/{group_index}",
                        "index": index,
                    } | scenario
    return places, models


def _add_logged(connection: Connection, places: defaultdict[str, Place], models: defaultdict[str, set[str]]) -> None:
    """Add split and step of trajectories that were logged but not trained."""
    for row in connection.execute(select(logs.c.model, logs.c.body).order_by(logs.c.id)):
        entry = orjson.loads(row.body)
        for trajectory_id in entry.get("trajectory_ids", ()):
            models[trajectory_id].add(row.model)
            if "group" not in places[trajectory_id]:
                places[trajectory_id] |= {"split": entry["split"], "step": entry.get("step")}


def _add_called(
    connection: Connection, ids: Sequence[str], places: defaultdict[str, Place], models: defaultdict[str, set[str]]
) -> None:
    """Add the called models, and as a trajectory's step the smallest step of the calls to its own model."""
    own = dict(connection.execute(select(_OLD.c.id, _OLD.c.model).where(_OLD.c.id.in_(ids))).tuples().all())
    steps = defaultdict[str, list[int]](list)
    for trajectory_id, model, step in connection.execute(called(_OLD, ids)):
        models[trajectory_id].add(model)
        if model == own[trajectory_id]:
            steps[trajectory_id].append(step)
    for trajectory_id, model in own.items():
        models[trajectory_id].add(model)
        if steps[trajectory_id]:
            places[trajectory_id]["step"] = min(steps[trajectory_id])


def _share_steps(places: Mapping[str, Place]) -> None:
    """Set the step of rollouts without calls to the smallest step of their group."""
    steps: dict[str, int] = {}
    for place in places.values():
        if "group" in place and "step" in place:
            steps[place["group"]] = min(place["step"], steps.get(place["group"], place["step"]))
    for place in places.values():
        if place.get("group") in steps:
            place.setdefault("step", steps[place["group"]])


def _row(row: Row[Json], seq: int, known: Place) -> dict[str, Json]:
    body = orjson.loads(row.body)
    place: Place = dict.fromkeys(_NAMES) | _scenario(body.get("metadata", {})) | known
    return {
        "id": row.id,
        "seq": seq,
        "model": row.model,
        "explicit": row.explicit,
        "reward": row.reward,
        "failed": body.get("exception") is not None,
        "ended_at": row.ended_at,
        "run": place["run"],
        "split": place["split"],
        "step": place["step"],
        "scenario": place["scenario"],
        "group_id": place["group"],
        "group_index": place["index"],
        "body": orjson.dumps(body | {"place": place}).decode(),
    }


def _scenario(metadata: Json) -> Place:
    """The scenario's id that trainer and adapter wrote to metadata. Empty if the value cannot be such an id."""
    name = metadata.get("scenario_id")
    usable = isinstance(name, str) and 0 < len(name) <= _LONGEST and "\0" not in name
    return {"scenario": name} if usable else {}
