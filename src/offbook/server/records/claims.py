"""Finishes trajectories: decides in one transaction which recorded choices belong to which trajectory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import orjson
from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    FromClause,
    and_,
    bindparam,
    delete,
    func,
    insert,
    not_,
    or_,
    select,
    union,
    update,
)

from offbook.base.errors import OffbookError
from offbook.base.json_files import parse_json
from offbook.base.types import (
    CallRef,
    Json,
    Message,
    RenderedHistory,
)
from offbook.base.wire import OPEN, TrajectoryRecord

from ..errors import ApiError
from .tables import calls, outputs, trajectories, trajectory_models

K = TypeVar("K")

CHUNK = 500
"""Most ids in one statement: databases limit its parameters."""
_SHOWN = 10  # unknown calls that an error message lists

Finish = tuple[TrajectoryRecord, ...]
"""The trajectories of one request."""


@dataclass(frozen=True)
class _Owner:
    """Whose a recorded choice is: the trajectory that its call named, and the one that claims it."""

    recorded_under: str
    claimed_by: str | None


def finish(connection: Connection, batch: Sequence[Finish]) -> list[dict[str, int] | OffbookError]:
    """Finish the trajectories of each request and claim their calls. The result is the number of calls per trajectory id.

    A request with one of these faults writes nothing, and its result is the ApiError:

    * 404: a claimed call is unknown, or `weights`, `call_rewards` or `unused` name a call of another trajectory.
    * 409: two trajectories claim one choice, or several calls match a choice that does not name its call.
    """
    results: list[dict[str, int] | OffbookError] = []
    for records in batch:
        try:
            records = named_by_content(connection, records)
            claims = _checked(connection, records)
        except ApiError as refusal:
            results.append(refusal)
            continue
        _claim(connection, records, claims)
        _save(connection, records)
        results.append(_counts(connection, records))
    return results


def _checked(connection: Connection, records: Finish) -> dict[CallRef, str]:
    claims = _claims_of(records)
    ids = {record.id for record in records}
    owners = _owners(connection, sorted({ref.call_id for ref in claims}), outputs.c.call_id)
    unknown = [ref for ref in claims if ref not in owners]
    if unknown:
        shown = ", ".join(f"{ref.call_id}[{ref.index}]" for ref in unknown[:_SHOWN])
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise ApiError(
            404,
            f"no recorded call {shown}{more}: it was never recorded here, or expired before a trajectory claimed it "
            "(--unclaimed-ttl)",
            "trajectories.calls",
            "unknown_call",
        )
    whole = {record.id for record in records if record.calls is None}
    for ref, claimant in claims.items():
        owner = owners[ref].recorded_under if owners[ref].recorded_under in whole else owners[ref].claimed_by
        if owner is not None and owner != claimant and (owner in whole or owner not in ids):
            raise _claimed_twice(ref, owner, claimant)
    taken = outputs.c.claimed_by != calls.c.trajectory_id
    for ref, elsewhere in _owners(connection, sorted(whole), calls.c.trajectory_id, taken).items():
        if elsewhere.claimed_by not in ids:
            raise _claimed_twice(ref, elsewhere.claimed_by or "", elsewhere.recorded_under)
    _check_named(connection, records)
    return claims


def _check_named(connection: Connection, records: Finish) -> None:
    """Raise ApiError 404 if `weights`, `call_rewards` or `unused` name a call of another trajectory.

    Failed and late calls belong to their trajectory too.
    """
    named = {
        call_id
        for record in records
        if record.calls is None
        for call_id in (*record.weights, *record.call_rewards, *record.unused)
    }
    under: dict[str, str] = {}
    for chunk in chunks(sorted(named)):
        rows = connection.execute(select(calls.c.id, calls.c.trajectory_id).where(calls.c.id.in_(chunk)))
        under |= {call_id: trajectory_id for call_id, trajectory_id in rows}
    for record in records:
        own = None if record.calls is None else {ref.call_id for ref in record.calls}
        fields = (("weights", record.weights), ("call_rewards", record.call_rewards), ("unused", record.unused))
        for field, ids in fields:
            for call_id in ids:
                if under.get(call_id) != record.id if own is None else call_id not in own:
                    raise _not_a_call_of(record, field, call_id)


def _not_a_call_of(record: TrajectoryRecord, field: str, call_id: str) -> ApiError:
    its_calls = "recorded under its id" if record.calls is None else "in its list `calls`"
    return ApiError(
        404,
        f"trajectory {record.id!r}: {field} names call {call_id!r}, which is none of its calls: it is not {its_calls}",
        f"trajectories.{field}",
        "unknown_call",
    )


def _claims_of(records: Finish) -> dict[CallRef, str]:
    """The trajectory that claims each choice. It may name the choice in several histories; another trajectory may not.

    Raises ApiError: 400 if a trajectory is in the request twice, 409 if two trajectories claim a choice.
    """
    claims: dict[CallRef, str] = {}
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            raise ApiError(400, f"trajectory {record.id!r} is in the request twice", "trajectories.id", "duplicate_id")
        seen.add(record.id)
        for ref in record.calls or ():
            if claims.setdefault(ref, record.id) != record.id:
                raise _claimed_twice(ref, claims[ref], record.id)
    return claims


def _claimed_twice(ref: CallRef, owner: str, claimant: str) -> ApiError:
    return ApiError(
        409,
        f"choice {ref.index} of call {ref.call_id} belongs to trajectory {owner!r}, so {claimant!r} cannot have it: a "
        "sampled choice is trained in one trajectory (sample again, or use one trajectory with additional histories)",
        "trajectories.calls",
        "claimed_twice",
    )


def _owners(
    connection: Connection, ids: Sequence[str], under: ColumnElement[str], *conditions: ColumnElement[bool]
) -> dict[CallRef, _Owner]:
    """The recorded choices where the column `under` is one of the ids, and the conditions hold."""
    owners: dict[CallRef, _Owner] = {}
    for chunk in chunks(ids):
        rows = connection.execute(
            select(outputs.c.call_id, outputs.c.choice, outputs.c.claimed_by, calls.c.trajectory_id)
            .join(calls, calls.c.id == outputs.c.call_id)
            .where(under.in_(chunk), *conditions)
        )
        owners |= {CallRef(call_id=row[0], index=row[1]): _Owner(row[3], row[2]) for row in rows}
    return owners


def _claim(connection: Connection, records: Finish, claims: dict[CallRef, str]) -> None:
    for chunk in chunks([record.id for record in records]):
        connection.execute(update(outputs).where(outputs.c.claimed_by.in_(chunk)).values(claimed_by=None))
    if claims:
        connection.execute(
            update(outputs)
            .where(outputs.c.call_id == bindparam("ref_call"), outputs.c.choice == bindparam("ref_index"))
            .values(claimed_by=bindparam("owner")),
            [{"ref_call": ref.call_id, "ref_index": ref.index, "owner": owner} for ref, owner in claims.items()],
        )
    under = select(calls.c.trajectory_id).where(calls.c.id == outputs.c.call_id).scalar_subquery()
    for chunk in chunks([record.id for record in records if record.calls is None]):
        own = select(calls.c.id).where(calls.c.trajectory_id.in_(chunk), not_(calls.c.late))
        connection.execute(update(outputs).where(outputs.c.call_id.in_(own)).values(claimed_by=under))


def _save(connection: Connection, records: Finish) -> None:
    """Write the trajectories, replacing earlier versions. A replaced trajectory keeps its position in lists."""
    seqs: dict[str, int] = {}
    last = connection.scalar(select(func.max(trajectories.c.seq))) or 0  # before the newest may be deleted
    for chunk in chunks([record.id for record in records]):
        own = trajectories.c.id.in_(chunk)
        seqs |= {
            name: seq for name, seq in connection.execute(select(trajectories.c.id, trajectories.c.seq).where(own))
        }
        connection.execute(delete(trajectories).where(own))
    for record in records:
        seqs.setdefault(record.id, last := last + 1)
    connection.execute(insert(trajectories), [trajectory_row(record, seqs[record.id]) for record in records])
    _list_by_model(connection, records, seqs)


def _list_by_model(connection: Connection, records: Finish, seqs: dict[str, int]) -> None:
    """List each trajectory under the model that it was finished for and under those that it called.

    Earlier entries stay if it is finished again, for example for another model of the same run.
    """
    pairs = {(record.id, record.model) for record in records}
    listed: set[tuple[int, str]] = set()
    for chunk in chunks([record.id for record in records]):
        pairs |= {(name, model) for name, model, _ in connection.execute(called(trajectories, chunk))}
        own = trajectory_models.c.seq.in_([seqs[name] for name in chunk])
        listed |= set(connection.execute(select(trajectory_models).where(own)).tuples())
    new = {(seqs[name], model) for name, model in pairs} - listed
    if new:
        connection.execute(insert(trajectory_models), [{"seq": seq, "model": model} for seq, model in sorted(new)])


def called(of: FromClause, ids: Sequence[str]) -> CompoundSelect[str, str, int]:
    """A query for the distinct (trajectory id, model, step) of the calls of these trajectories in the table `of`.

    Late calls are left out.
    """
    columns = (of.c.id, calls.c.model, calls.c.step)
    whole = select(*columns).join_from(of, calls, calls.c.trajectory_id == of.c.id)
    claimed = (
        select(*columns)
        .join_from(of, outputs, outputs.c.claimed_by == of.c.id)
        .join(calls, calls.c.id == outputs.c.call_id)
    )
    own = of.c.id.in_(ids)
    return union(whole.where(own, not_(of.c.explicit), not_(calls.c.late)), claimed.where(own))


def trajectory_row(record: TrajectoryRecord, seq: int) -> dict[str, Json]:
    """The row of a finished trajectory. `seq` is its number in order of finishing."""
    return {
        "id": record.id,
        "seq": seq,
        "model": record.model,
        "explicit": record.calls is not None,
        "reward": record.reward,
        "failed": record.exception is not None,
        "ended_at": record.ended_at,
        "run": record.place.run,
        "split": record.place.split,
        "step": record.place.step,
        "scenario": record.place.scenario,
        "group_id": record.place.group,
        "group_index": record.place.index,
        "body": record.model_dump_json(),
    }


def _counts(connection: Connection, records: Finish) -> dict[str, int]:
    counts = {record.id: len({ref.call_id for ref in record.calls or ()}) for record in records}
    for chunk in chunks([record.id for record in records if record.calls is None]):
        rows = connection.execute(
            select(calls.c.trajectory_id, func.count())
            .where(and_(calls.c.trajectory_id.in_(chunk), not_(calls.c.late)))
            .group_by(calls.c.trajectory_id)
        )
        counts |= {trajectory_id: count for trajectory_id, count in rows}
    return counts


def chunks(ids: Sequence[K]) -> Iterator[Sequence[K]]:
    """Split ids into parts of at most `CHUNK`.

    >>> [len(part) for part in chunks(range(1200))]
    [500, 500, 200]
    """
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]


CLOCK_SECONDS = 5.0
"""Largest difference between the clocks of client and server."""
TARGETS = ("complete", "truncated")
"""Statuses of choices that can be trained."""

Content = tuple[str, str, str]
"""Model, conversation and answer of a call, reduced to what clients keep."""


@dataclass(frozen=True)
class _Recorded:
    """A recorded choice, the trajectory that claims it, and everything of it that training reads (`sample`)."""

    ref: CallRef
    owner: str | None
    started_at: float
    sample: tuple[object, ...]


def named_by_content(connection: Connection, records: Sequence[TrajectoryRecord]) -> tuple[TrajectoryRecord, ...]:
    """Move targets of histories that match a recorded choice to `calls`.

    Only calls outside a capture are considered, and each is used for one trajectory. A target without a recorded call stays
    in its history and is rendered for training. Raises ApiError 409 if several calls match and their tokens differ.
    """
    unnamed = [record for record in records if record.calls is not None and record.histories]
    if not unnamed:
        return tuple(records)
    recorded = _recorded(connection, unnamed)
    taken = set(ref for record in records for ref in record.calls or ())
    named = {record.id: _named(record, recorded, taken) for record in unnamed}
    return tuple(named.get(record.id, record) for record in records)


def _named(record: TrajectoryRecord, recorded: dict[Content, list[_Recorded]], taken: set[CallRef]) -> TrajectoryRecord:
    refs: dict[Content, CallRef] = {}
    histories: list[RenderedHistory] = []
    for history in record.histories:
        remaining: list[int] = []
        for target in history.targets:
            content = _content(record.model, history.messages[:target], history.messages[target])
            unclaimed = [choice for choice in recorded.get(content, ()) if choice.ref not in taken]
            chosen = _chosen(record, [choice for choice in unclaimed if choice.owner in (None, record.id)])
            if chosen is not None:
                taken.add(chosen)
                refs[content] = chosen
                record = record.model_copy(update={"calls": (*(record.calls or ()), chosen)})
            elif content not in refs:  # several histories may contain the same choice
                remaining.append(target)
        if remaining:
            histories.append(history.model_copy(update={"targets": tuple(remaining)}))
    return record.model_copy(update={"histories": tuple(histories)})


def _chosen(record: TrajectoryRecord, candidates: Sequence[_Recorded]) -> CallRef | None:
    """The matching call. Prefers calls that the trajectory claims already, then those during the rollout.

    Several calls with equal samples are interchangeable: the first is chosen.
    """
    own = [choice for choice in candidates if choice.owner == record.id]
    begun, ended = record.started_at - CLOCK_SECONDS, record.ended_at + CLOCK_SECONDS
    candidates = own or [choice for choice in candidates if begun <= choice.started_at <= ended] or candidates
    if len({choice.sample for choice in candidates}) > 1:
        names = ", ".join(choice.ref.call_id for choice in candidates[:5])
        raise ApiError(
            409,
            f"trajectory {record.id!r}: a choice does not name its call, and {len(candidates)} recorded calls with different "
            f"tokens or settings match its messages and answer ({names}): append `completion.choices[0]` itself, which "
            "names its call (litellm's too), or make the calls inside capture_auto_trajectory",
            "trajectories.histories",
            "ambiguous_call",
        )
    return candidates[0].ref if candidates else None


def _recorded(connection: Connection, records: Sequence[TrajectoryRecord]) -> dict[Content, list[_Recorded]]:
    """The recorded choices that can match a target, by content, in order of start."""
    answers = {
        _answer(history.messages[target])
        for record in records
        for history in record.histories
        for target in history.targets
    }
    claimed_here: ColumnElement[bool] = outputs.c.claimed_by.in_([record.id for record in records])
    query = (
        select(
            *(calls.c.id, calls.c.model, calls.c.step, calls.c.started_at, calls.c.prompt_ids, calls.c.body),
            *(outputs.c.choice, outputs.c.claimed_by, outputs.c.token_ids, outputs.c.message),
        )
        .join(calls, calls.c.id == outputs.c.call_id)
        .where(
            calls.c.trajectory_id.startswith(f"{OPEN}-", autoescape=True),
            calls.c.model.in_([record.model for record in records]),
            or_(outputs.c.claimed_by.is_(None), claimed_here),
            outputs.c.status.in_(TARGETS),
        )
        .order_by(calls.c.started_at, calls.c.id, outputs.c.choice)
    )
    by_content: dict[Content, list[_Recorded]] = defaultdict(list)
    for row in connection.execute(query):
        message: Message = orjson.loads(row.message)
        if _answer(message) not in answers:
            continue
        body: dict[str, Json] = orjson.loads(row.body)
        sample = (row.prompt_ids, row.token_ids, row.step, json.dumps(body["sampling"]), body["constrained"])
        ref = CallRef(call_id=row.id, index=row.choice)
        content = _content(row.model, body["messages"], message)
        by_content[content].append(_Recorded(ref, row.claimed_by, row.started_at, sample))
    return by_content


def _content(model: str, messages: Sequence[Message], answer: Message) -> Content:
    conversation = json.dumps([[message.get("role"), _answer(message)] for message in messages])
    return model, conversation, _answer(answer)


def _answer(message: Message) -> str:
    """Text and tool calls of a message, which every library keeps. Many drop reasoning and the ids of tool calls."""
    tools = [_tool_call(tool.get("function") or {}) for tool in message.get("tool_calls") or ()]
    return json.dumps(["".join(_texts(message.get("content"))), tools])


def _texts(content: Json) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        parts = cast("list[str | dict[str, Json]]", content)
        yield from (part if isinstance(part, str) else str(part.get("text", "")) for part in parts)


def _tool_call(function: dict[str, Json]) -> tuple[str, str]:
    name, arguments = str(function.get("name")), str(function.get("arguments") or "{}")
    try:
        return name, json.dumps(parse_json(arguments), sort_keys=True)
    except ValueError:
        return name, arguments
