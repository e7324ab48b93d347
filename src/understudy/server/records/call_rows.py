"""Calls as rows and back: int32 and float32 blobs for tokens, JSON text for what is nested."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import TypedDict

import orjson
from sqlalchemy import Row

from ...types import Call, CallOutput, CallStatus, Json
from ...wire import CallTrace, OutputTrace


class CallRow(TypedDict):
    id: str
    trajectory_id: str
    idempotency_key: str | None
    model: str
    step: int
    status: str
    started_at: float
    ended_at: float
    prompt_ids: bytes
    body: str


class OutputRow(TypedDict):
    call_id: str
    choice: int
    claimed_by: str | None
    status: str
    finish_reason: str | None
    token_ids: bytes
    logprobs: bytes
    message: str


def call_row(call: Call, idempotency_key: str | None) -> CallRow:
    """The call without its outputs; whether it is late the records know."""
    origin = call.origin.model_dump() if call.origin is not None else None
    body = {
        "sampling": call.sampling.model_dump(),
        "constrained": call.constrained,
        "messages": call.messages,
        "tools": call.tools,
        "origin": origin,
        "error": call.error,
        "parse_failures": [output.index for output in call.outputs if output.parse_failure],
    }
    return CallRow(
        id=call.id,
        trajectory_id=call.trajectory_id,
        idempotency_key=idempotency_key,
        model=call.model,
        step=call.step,
        status=call.status.value,
        started_at=call.started_at,
        ended_at=call.ended_at,
        prompt_ids=pack_ids(call.prompt_ids),
        body=orjson.dumps(body).decode(),
    )


def output_rows(call: Call) -> list[OutputRow]:
    """One row for each choice of the call."""
    return [
        OutputRow(
            call_id=call.id,
            choice=output.index,
            claimed_by=None,
            status=output.status.value,
            finish_reason=output.finish_reason,
            token_ids=pack_ids(output.token_ids),
            logprobs=pack_logprobs(output.logprobs),
            message=orjson.dumps(output.message).decode(),
        )
        for output in call.outputs
    ]


def call_of(row: Row[Json], outputs: Iterable[Row[Json]]) -> Call:
    """The call of a `calls` row with those of its `outputs` rows, in order of index."""
    body = orjson.loads(row.body)
    failures = frozenset[int](body.pop("parse_failures", ()))  # records of before have none
    return Call(
        id=row.id,
        trajectory_id=row.trajectory_id,
        model=row.model,
        step=row.step,
        status=CallStatus(row.status),
        late=row.late,
        started_at=row.started_at,
        ended_at=row.ended_at,
        prompt_ids=unpack_ids(row.prompt_ids),
        outputs=tuple(
            sorted(
                (output_of(output, output.choice in failures) for output in outputs), key=lambda output: output.index
            )
        ),
        **body,
    )


def output_of(row: Row[Json], parse_failure: bool) -> CallOutput:
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
    """The call without its tokens, of rows that have the bytes of the token columns instead of these."""
    body = orjson.loads(row.body)
    failures = frozenset[int](body.pop("parse_failures", ()))
    return CallTrace(
        id=row.id,
        trajectory_id=row.trajectory_id,
        model=row.model,
        step=row.step,
        status=CallStatus(row.status),
        late=row.late,
        started_at=row.started_at,
        ended_at=row.ended_at,
        prompt_tokens=(row.prompt_bytes or 0) // 4,
        outputs=tuple(
            output_trace_of(output, output.choice in failures)
            for output in sorted(outputs, key=lambda output: output.choice)
        ),
        **body,
    )


def output_trace_of(row: Row[Json], parse_failure: bool) -> OutputTrace:
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


# struct rather than numpy: for the tokens of one call it is done sooner.


def pack_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // 4}i", blob)


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(logprobs)}f", *logprobs)


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(blob) // 4}f", blob)
