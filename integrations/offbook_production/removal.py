"""Deletes trajectories with their calls: in the records, in the file of the database, and in other files of the directory."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, Engine, delete, or_, select, update

from offbook.base.errors import EngineError, OffbookError
from offbook.base.types import Json
from offbook.engine import token_file
from offbook.engine.checkpoint_files import write_bytes
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


def remove_from_files(root: Path, ids: Collection[str]) -> int:
    """Delete the token files and the jobs that have one of these trajectories, and their lines in JSON Lines files, such as those
    of a trace sink. Returns the number of files and jobs that were changed or deleted. Blocks. Raises OSError."""
    changed = 0
    for folder in root.glob("*/models/*/tokens"):
        for path in token_file.files(folder):
            if _has_tokens(path, ids):
                path.unlink(missing_ok=True)
                changed += 1
    marks = {json.dumps(name, ensure_ascii=plain).encode() for name in ids for plain in (True, False)}
    for job in root.glob("jobs/*/job.json"):
        if _names(job.read_bytes(), marks):
            shutil.rmtree(job.parent)
            changed += 1
    for path in root.rglob("*.jsonl"):
        lines = path.read_bytes().split(b"\n")
        kept = [line for line in lines if not _names(line, marks)]
        if len(kept) < len(lines):
            write_bytes(path, b"\n".join(kept))
            changed += 1
    return changed


def _has_tokens(path: Path, ids: Collection[str]) -> bool:
    """Whether a token file has a trajectory. One that cannot be read may have it."""
    try:
        return any(call.trajectory in ids for call in token_file.read_head(path).calls)
    except FileNotFoundError:
        return False
    except EngineError as error:
        logger.warning("%s. It is deleted with the removed trajectories", error)
        return True


def _names(text: bytes, marks: Collection[bytes]) -> bool:
    """Whether JSON has one of these strings."""
    return any(mark in text for mark in marks)
