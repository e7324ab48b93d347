"""Feedback on finished trajectories: scores and comments that arrive later, become metrics, and where none was set the reward."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, TypeAlias, cast

from sqlalchemy import Connection, select

from offbook.base.errors import OffbookError
from offbook.base.redaction import redacted_record
from offbook.base.types import Json
from offbook.base.wire import TrajectoryRecord
from offbook.server.errors import ApiError
from offbook.server.records.claims import Finish, chunks, finish
from offbook.server.records.tables import calls, outputs, trajectories

from .wire import REWARDING, FeedbackRequest, FeedbackResult

FIELD = "feedback"
"""Where a trajectory's metadata has its feedback, by name and, for a call's, its id."""


class Feedback(NamedTuple):
    """Feedback, the trajectory that it is for (None: that of its call), and when it came (unix seconds)."""

    request: FeedbackRequest
    trajectory_id: str | None
    received_at: float


def add_feedback(connection: Connection, batch: Sequence[Feedback]) -> list[FeedbackResult | OffbookError]:
    """Store each feedback. The same name for the same trajectory or call replaces the one before; equal feedback changes nothing.

    404 for a call, thread or trajectory that is not recorded, 409 for a trajectory that is not finished.
    """
    results: list[FeedbackResult | OffbookError] = []
    for feedback in batch:
        try:
            results.append(_add(connection, feedback))
        except ApiError as refusal:
            results.append(refusal)
    return results


def keep_feedback(connection: Connection, records: Finish) -> Finish:
    """Before trajectories are finished: one that was finished before keeps the feedback that came since."""
    entries: dict[str, Entries] = {}
    for chunk in chunks([record.id for record in records]):
        bodies = connection.scalars(select(trajectories.c.body).where(trajectories.c.id.in_(chunk)))
        for before in map(TrajectoryRecord.model_validate_json, bodies):
            entries[before.id] = _entries(before) or {}
    return tuple(_with(record, known) if (known := entries.get(record.id)) else record for record in records)


Entries: TypeAlias = dict[str, dict[str, Json]]
"""The feedback of a trajectory, by its name and, for a call's, the call's id."""


def _entries(record: TrajectoryRecord) -> Entries | None:
    """The feedback in a trajectory's metadata. None if the app has something of its own there."""
    stored = record.metadata.get(FIELD, {})
    entries = list(cast(Entries, stored).values()) if isinstance(stored, dict) else [stored]
    return cast(Entries, stored) if all(isinstance(entry, dict) and "score" in entry for entry in entries) else None


def _with(record: TrajectoryRecord, entries: Entries) -> TrajectoryRecord:
    """The trajectory with this feedback: in its metadata, as metrics, and as its reward if it has none."""
    means = {name: _mean(entries, name) for name in dict.fromkeys(key.partition(" ")[0] for key in entries)}
    changed: dict[str, Json] = {
        "metadata": {**record.metadata, FIELD: entries},
        "metrics": {**record.metrics, **{f"{FIELD}/{name}": mean for name, mean in means.items()}},
        "reward": means.get(REWARDING) if record.reward is None else record.reward,
    }
    return record.model_copy(update=changed)


def _add(connection: Connection, feedback: Feedback) -> FeedbackResult:
    request = feedback.request
    record = _record(connection, feedback)
    known = _entries(record)
    if known is None:
        raise ApiError(
            409,
            f"trajectory {record.id!r} has metadata of its own under {FIELD!r}, where feedback is stored: finish it again "
            "with another name for it",
            "metadata",
            "metadata_taken",
        )
    key = request.name if request.call_id is None else f"{request.name} {request.call_id}"
    entry: dict[str, Json] = {"score": request.score, "comment": request.comment}
    before = known.get(key)
    if before is not None and {name: before.get(name) for name in entry} == entry:
        return FeedbackResult(trajectory_id=record.id, reward=record.reward, changed=False)
    rewarded = record.reward is None or _mean(known, REWARDING) == record.reward
    entries = {**known, key: {**entry, "at": feedback.received_at}}
    unrewarded = record.model_copy(update={"reward": None}) if rewarded else record
    whole = redacted_record(_with(unrewarded, entries))
    [failure] = finish(connection, [(whole,)])
    if isinstance(failure, OffbookError):
        raise failure
    return FeedbackResult(trajectory_id=whole.id, reward=whole.reward, changed=True)


def _mean(entries: Entries, name: str) -> float | None:
    """The mean score of a name: of the trajectory itself where it has one, else of its calls."""
    if name in entries:
        return entries[name]["score"]
    scores = [entry["score"] for key, entry in entries.items() if key.partition(" ")[0] == name]
    return fmean(scores) if scores else None


def _record(connection: Connection, feedback: Feedback) -> TrajectoryRecord:
    request = feedback.request
    name = feedback.trajectory_id or _trajectory_of(connection, str(request.call_id))
    body = connection.scalar(select(trajectories.c.body).where(trajectories.c.id == name))
    if body is None:
        if connection.scalar(select(calls.c.id).where(calls.c.trajectory_id == name).limit(1)) is not None:
            raise ApiError(
                409,
                f"trajectory {name!r} is not finished: give its reward when its rollout ends, or send feedback afterwards",
                code="unfinished_trajectory",
            )
        raise _unknown(request)
    record = TrajectoryRecord.model_validate_json(body)
    outside = name == str(request.call_id).rpartition(".")[0]
    if outside and all(call.id != request.call_id for call in record.outside_calls):
        raise _unknown(request)
    return record


def _trajectory_of(connection: Connection, call_id: str) -> str:
    """The trajectory of a call: the one that claims it or that it was recorded under; one before a paid model begins its id."""
    claimed = select(outputs.c.claimed_by).where(outputs.c.call_id == call_id, outputs.c.claimed_by.is_not(None))
    under = select(calls.c.trajectory_id).where(calls.c.id == call_id)
    return connection.scalar(claimed) or connection.scalar(under) or call_id.rpartition(".")[0]


def _unknown(request: FeedbackRequest) -> ApiError:
    if request.thread_id is not None:
        message = (
            f"thread {request.thread_id!r} is not recorded: it is unknown, outside --record-share, or was deleted by "
            "--record-days or --record-mb"
        )
        return ApiError(404, message, "thread_id", "unknown_thread")
    if request.call_id is not None:
        return ApiError(404, f"call {request.call_id!r} is not recorded", "call_id", "unknown_call")
    message = f"no trajectory {request.trajectory_id!r}: nothing was recorded or finished under that id"
    return ApiError(404, message, "trajectory_id", "unknown_trajectory")
