"""Calls as database rows: how they are stored, and read back with the choices that belong to a trajectory.

Token ids are stored as int32 blobs, logprobs as float32 blobs, nested values as JSON text.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import orjson
from sqlalchemy import ColumnElement, Connection, Row, func, or_, select

from offbook.base.types import (
    Call,
    CallOutput,
    CallStatus,
    CallTrace,
    Json,
    OutputTrace,
)
from offbook.base.wire import (
    RolloutTrace,
    TracePage,
    TrajectoryQuery,
    TrajectoryRecord,
)

from .claims import chunks
from .listing import page
from .tables import calls, outputs, trajectories


def call_row(call: Call, idempotency_key: str | None) -> dict[str, Json]:
    """The row of a call, without `late`, which is determined when the row is inserted. Its choices have rows of their own
    (`output_rows`)."""
    origin = call.origin.model_dump() if call.origin is not None else None
    body = {
        "sampling": call.sampling.model_dump(),
        "constrained": call.constrained,
        "messages": call.messages,
        "tools": call.tools,
        "origin": origin,
        "error": call.error,
        "first_token_at": call.first_token_at,
        "parse_failures": [output.index for output in call.outputs if output.parse_failure],
        **({"allowed_texts": call.allowed_texts} if call.allowed_texts else {}),
    }
    return {
        "id": call.id,
        "trajectory_id": call.trajectory_id,
        "idempotency_key": idempotency_key,
        "model": call.model,
        "step": call.step,
        "status": call.status.value,
        "started_at": call.started_at,
        "ended_at": call.ended_at,
        "prompt_ids": pack_ids(call.prompt_ids),
        "body": orjson.dumps(body).decode(),
    }


def output_rows(call: Call) -> list[dict[str, Json]]:
    """One row per choice of the call, not claimed by any trajectory yet."""
    return [
        {
            "call_id": call.id,
            "choice": output.index,
            "claimed_by": None,
            "status": output.status.value,
            "finish_reason": output.finish_reason,
            "token_ids": pack_ids(output.token_ids),
            "logprobs": pack_logprobs(output.logprobs),
            "message": orjson.dumps(output.message).decode(),
        }
        for output in call.outputs
    ]


def call_of(row: Row[Json], outputs: Iterable[Row[Json]]) -> Call:
    """Build a call from its row and rows of its choices. The choices are sorted by index."""
    fields, failures = _fields_of(row)
    return Call(
        prompt_ids=unpack_ids(row.prompt_ids),
        outputs=tuple(
            sorted(
                (output_of(output, output.choice in failures) for output in outputs), key=lambda output: output.index
            )
        ),
        **fields,
    )


def _fields_of(row: Row[Json]) -> tuple[dict[str, Json], frozenset[int]]:
    body: dict[str, Json] = orjson.loads(row.body)
    failures = frozenset[int](body.pop("parse_failures"))
    columns = {
        name: getattr(row, name) for name in ("id", "trajectory_id", "model", "step", "late", "started_at", "ended_at")
    }
    return {**columns, "status": CallStatus(row.status), **body}, failures


def output_of(row: Row[Json], parse_failure: bool) -> CallOutput:
    """Build a choice from its row. `parse_failure` is stored with the call."""
    return CallOutput(
        index=row.choice,
        token_ids=unpack_ids(row.token_ids),
        logprobs=unpack_logprobs(row.logprobs),
        message=orjson.loads(row.message),
        finish_reason=row.finish_reason,
        status=CallStatus(row.status),
        parse_failure=parse_failure,
    )


def call_trace_of(row: Row[Json], outputs: Iterable[Row[Json]]) -> CallTrace:
    """Build a call without token ids. The rows have `prompt_bytes` and `token_bytes`, the lengths of the blobs."""
    fields, failures = _fields_of(row)
    fields.pop("allowed_texts", None)
    return CallTrace(
        prompt_tokens=(row.prompt_bytes or 0) // 4,
        outputs=tuple(
            output_trace_of(output, output.choice in failures)
            for output in sorted(outputs, key=lambda output: output.choice)
        ),
        **fields,
    )


def output_trace_of(row: Row[Json], parse_failure: bool) -> OutputTrace:
    """Build a choice without token ids. Mean and minimum leave out missing logprobs; without any they are None."""
    logprobs = [value for value in unpack_logprobs(row.logprobs) if not math.isnan(value)]
    return OutputTrace(
        index=row.choice,
        message=orjson.loads(row.message),
        finish_reason=row.finish_reason,
        status=CallStatus(row.status),
        parse_failure=parse_failure,
        tokens=(row.token_bytes or 0) // 4,
        logprob_mean=math.fsum(logprobs) / len(logprobs) if logprobs else None,
        logprob_min=min(logprobs, default=None),
    )


# struct is faster than numpy for the tokens of one call.
def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32.

    >>> pack_ids([1, 258]).hex()
    '0100000002010000'
    """
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`.

    >>> unpack_ids(pack_ids([1, 258]))
    (1, 258)
    """
    return struct.unpack(f"<{len(blob) // 4}i", blob)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Logprobs as little-endian float32. NaN marks a missing logprob.

    >>> pack_logprobs([-0.5]).hex()
    '000000bf'
    """
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    """The inverse of `pack_logprobs`, with float32 precision.

    >>> unpack_logprobs(pack_logprobs([-0.5, float("nan")]))
    (-0.5, nan)
    """
    return struct.unpack(f"<{len(blob) // 4}f", blob)


C = TypeVar("C")


@dataclass(frozen=True)
class CallForm(Generic[C]):
    """Which columns of a call and its choices are read, and the function that builds a call from these rows."""

    call_columns: tuple[ColumnElement[Json], ...]
    output_columns: tuple[ColumnElement[Json], ...]
    build: Callable[[Row[Json], Iterable[Row[Json]]], C]


WHOLE = CallForm[Call](tuple(calls.c), tuple(outputs.c), call_of)
"""All columns."""
WITHOUT_TOKENS = CallForm[CallTrace](
    (*(column for column in calls.c if column.name != "prompt_ids"), func.length(calls.c.prompt_ids).label("prompt_bytes")),
    (*(column for column in outputs.c if column.name != "token_ids"), func.length(outputs.c.token_ids).label("token_bytes")),
    call_trace_of,
)  # fmt: skip
"""Numbers of tokens instead of token ids."""


def trace_page(connection: Connection, query: TrajectoryQuery) -> TracePage:
    """A page of the finished trajectories that match the query, with their calls but without token ids."""
    listed = page(connection, query)
    calls_of = read_calls(connection, [record.id for record in listed.trajectories], WITHOUT_TOKENS)
    rollouts = tuple(_with_calls(record, calls_of[record.id]) for record in listed.trajectories)
    return TracePage(rollouts=rollouts, next=listed.next)


def _with_calls(record: TrajectoryRecord, recorded: tuple[CallTrace, ...]) -> RolloutTrace:
    """The rollout with its recorded calls; one that another LLM answered, with the calls in its record."""
    if not record.outside_calls:
        return RolloutTrace(record=record, calls=recorded)
    calls = sorted((*recorded, *record.outside_calls), key=lambda call: call.started_at)
    return RolloutTrace(record=record.model_copy(update={"outside_calls": ()}), calls=tuple(calls))


def read_calls(connection: Connection, ids: Sequence[str], form: CallForm[C]) -> dict[str, tuple[C, ...]]:
    """The calls of each trajectory in order of start, each with only the choices that belong to the trajectory.

    A claimed choice belongs to the trajectory that claims it. An unclaimed choice belongs to the trajectory that its call
    named, unless that trajectory lists its calls itself; there only choices of late calls stay. A trajectory without
    calls has an empty tuple.
    """
    calls_of: dict[str, tuple[C, ...]] = {}
    for chunk in chunks(list(dict.fromkeys(ids))):
        calls_of |= _of_chunk(connection, chunk, form)
    return calls_of


def _of_chunk(connection: Connection, ids: Sequence[str], form: CallForm[C]) -> dict[str, tuple[C, ...]]:
    explicit = set(
        connection.scalars(select(trajectories.c.id).where(trajectories.c.id.in_(ids), trajectories.c.explicit))
    )
    claimed = select(outputs.c.call_id).where(outputs.c.claimed_by.in_(ids))
    relevant = or_(calls.c.trajectory_id.in_(ids), calls.c.id.in_(claimed))
    rows = connection.execute(
        select(*form.call_columns).where(relevant).order_by(calls.c.started_at, calls.c.ended_at, calls.c.id)
    ).all()
    choices: dict[str, list[Row[Json]]] = defaultdict(list)
    for row in connection.execute(
        select(*form.output_columns).join(calls, calls.c.id == outputs.c.call_id).where(relevant)
    ):
        choices[row.call_id].append(row)
    calls_of: dict[str, list[C]] = {trajectory_id: [] for trajectory_id in ids}
    for row in rows:
        by_trajectory: dict[str, list[Row[Json]]] = defaultdict(list)
        for choice in choices[row.id]:
            by_trajectory[choice.claimed_by or row.trajectory_id].append(choice)
        for trajectory_id in {row.trajectory_id, *by_trajectory} & calls_of.keys():
            belonging = by_trajectory[trajectory_id]
            own = row.trajectory_id == trajectory_id
            if own and trajectory_id in explicit and not row.late:
                belonging = [choice for choice in belonging if choice.claimed_by == trajectory_id]
            # A call without choices has failed. It stays with the trajectory that it named.
            if belonging or (own and not choices[row.id] and trajectory_id not in explicit):
                calls_of[trajectory_id].append(form.build(row, belonging))
    return {trajectory_id: tuple(items) for trajectory_id, items in calls_of.items()}
