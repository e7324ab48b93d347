"""Identifies the calls of choices by content. Message converters of other libraries drop the mark that names the call."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import orjson
from sqlalchemy import ColumnElement, Connection, or_, select

from offbook.base.json_files import parse_json
from offbook.base.types import (
    CallRef,
    Json,
    Message,
    RenderedHistory,
)
from offbook.base.wire import OPEN, TrajectoryRecord

from ..errors import ApiError
from .tables import calls, outputs

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
