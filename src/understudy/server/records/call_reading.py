"""Reading calls: those of each trajectory with the choices that belong to it, whole or without their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Row, or_, select

from ...types import Call, Json
from ...wire import CallTrace, RolloutTrace, TracePage, TrajectoryQuery
from .call_rows import call_of, call_trace_of
from .claims import chunks
from .listing import page
from .tables import calls, outputs, trajectories

C = TypeVar("C")


@dataclass(frozen=True)
class CallForm(Generic[C]):
    """What is read of a call, and what it becomes."""

    call_columns: tuple[sa.ColumnElement[Json], ...]
    output_columns: tuple[sa.ColumnElement[Json], ...]
    build: Callable[[Row[Json], Iterable[Row[Json]]], C]


WHOLE = CallForm[Call](tuple(calls.c), tuple(outputs.c), call_of)
WITHOUT_TOKENS = CallForm[CallTrace](
    (*(each for each in calls.c if each.name != "prompt_ids"), sa.func.length(calls.c.prompt_ids).label("prompt_bytes")),
    (*(each for each in outputs.c if each.name != "token_ids"), sa.func.length(outputs.c.token_ids).label("token_bytes")),
    call_trace_of,
)  # fmt: skip


def trace_page(connection: Connection, query: TrajectoryQuery) -> TracePage:
    """The trajectories that fit, with their calls."""
    listed = page(connection, query)
    found = read_calls(connection, [record.id for record in listed.trajectories], WITHOUT_TOKENS)
    rollouts = tuple(RolloutTrace(record=record, calls=found[record.id]) for record in listed.trajectories)
    return TracePage(rollouts=rollouts, next=listed.next)


def read_calls(connection: Connection, ids: Sequence[str], form: CallForm[C]) -> dict[str, tuple[C, ...]]:
    """The calls of each trajectory in order of start, with those of their choices that belong to it."""
    found: dict[str, tuple[C, ...]] = {}
    for chunk in chunks(list(dict.fromkeys(ids))):
        found |= _of_chunk(connection, chunk, form)
    return found


def _of_chunk(connection: Connection, ids: Sequence[str], form: CallForm[C]) -> dict[str, tuple[C, ...]]:
    explicit = set(
        connection.scalars(select(trajectories.c.id).where(trajectories.c.id.in_(ids), trajectories.c.explicit))
    )
    claimed = select(outputs.c.call_id).where(outputs.c.claimed_by.in_(ids))
    either = or_(calls.c.trajectory_id.in_(ids), calls.c.id.in_(claimed))
    rows = connection.execute(
        select(*form.call_columns).where(either).order_by(calls.c.started_at, calls.c.ended_at, calls.c.id)
    ).all()
    choices: dict[str, list[Row[Json]]] = defaultdict(list)
    for row in connection.execute(
        select(*form.output_columns).join(calls, calls.c.id == outputs.c.call_id).where(either)
    ):
        choices[row.call_id].append(row)
    found: dict[str, list[C]] = {trajectory_id: [] for trajectory_id in ids}
    for row in rows:
        mine: dict[str, list[Row[Json]]] = defaultdict(list)
        for choice in choices[row.id]:
            mine[choice.claimed_by or row.trajectory_id].append(choice)
        for trajectory_id in {row.trajectory_id, *mine} & found.keys():
            taken = mine[trajectory_id]
            own = row.trajectory_id == trajectory_id
            if own and trajectory_id in explicit and not row.late:
                taken = [choice for choice in taken if choice.claimed_by == trajectory_id]
            # A call without any choice failed; it stays with the trajectory that it named.
            if taken or (own and not choices[row.id] and trajectory_id not in explicit):
                found[trajectory_id].append(form.build(row, taken))
    return {trajectory_id: tuple(items) for trajectory_id, items in found.items()}
