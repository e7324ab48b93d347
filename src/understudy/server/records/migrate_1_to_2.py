"""Schema 1 -> 2: trajectories know their place and are listed under every model that they called.

Works on rows and JSON as schema 1 had them, not on today's types. What can be known of old trajectories: models and steps
from their calls; group, index and split from train requests; the split of the others from logs; the scenario from metadata.
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
"""What is known of a rollout's place, by the names of RolloutPlace."""

_NAMES = ("run", "split", "step", "scenario", "group", "index")
_LONGEST = 500  # characters of a scenario's id
_OLD = table(
    "trajectories_1",
    *(column(name, String) for name in ("id", "model", "body")),
    *(column(name, Double) for name in ("reward", "ended_at")),
    column("explicit", Boolean),
)


def migrate_1_to_2(connection: Connection) -> None:
    """In the connection's transaction."""
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
        pairs = [{"seq": seqs[name], "model": model} for name in chunk for model in sorted(models[name])]
        connection.execute(insert(trajectory_models), pairs)
    connection.execute(text("DROP TABLE trajectories_1"))


def _trained(connection: Connection) -> tuple[defaultdict[str, Place], defaultdict[str, set[str]]]:
    """The places of the trajectories in train requests, by the first one that names them, and the models trained on each."""
    places = defaultdict[str, Place](dict)
    models = defaultdict[str, set[str]](set)
    for row in connection.execute(select(trains.c.id, trains.c.model, trains.c.request).order_by(trains.c.created_at)):
        for at, group in enumerate(orjson.loads(row.request).get("groups", ())):
            scenario = _scenario(group.get("metadata", {}))
            for index, name in enumerate(group["trajectory_ids"]):
                models[name].add(row.model)
                if name not in places:
                    places[name] = {"split": "train", "group": f"{row.id}/{at}", "index": index} | scenario
    return places, models


def _add_logged(connection: Connection, places: defaultdict[str, Place], models: defaultdict[str, set[str]]) -> None:
    """Split and step of the trajectories that were logged and not trained."""
    for row in connection.execute(select(logs.c.model, logs.c.body).order_by(logs.c.id)):
        entry = orjson.loads(row.body)
        for name in entry.get("trajectory_ids", ()):
            models[name].add(row.model)
            if "group" not in places[name]:
                places[name] |= {"split": entry["split"], "step": entry.get("step")}


def _add_called(
    connection: Connection, ids: Sequence[str], places: defaultdict[str, Place], models: defaultdict[str, set[str]]
) -> None:
    """The models that were called, and the step with which a trajectory began: the least that its own model's calls had."""
    own = dict(connection.execute(select(_OLD.c.id, _OLD.c.model).where(_OLD.c.id.in_(ids))).tuples().all())
    steps = defaultdict[str, list[int]](list)
    for name, model, step in connection.execute(called(_OLD, ids)):
        models[name].add(model)
        if model == own[name]:
            steps[name].append(step)
    for name, model in own.items():
        models[name].add(model)
        if steps[name]:
            places[name]["step"] = min(steps[name])


def _share_steps(places: Mapping[str, Place]) -> None:
    """A rollout without a call began with the others of its group."""
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
    """The id that the trainer and the adapter keep in metadata; nothing where it is another's word."""
    name = metadata.get("scenario_id")
    usable = isinstance(name, str) and 0 < len(name) <= _LONGEST and "\0" not in name
    return {"scenario": name} if usable else {}
