"""Reads the calls of trajectories with the choices that belong to them, with or without token ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, func, or_, select

from offbook.base.types import Call, CallTrace, Json
from offbook.base.wire import (
    RolloutTrace,
    TracePage,
    TrajectoryQuery,
    TrajectoryRecord,
)

from .call_rows import call_of, call_trace_of
from .claims import chunks
from .listing import page
from .tables import calls, outputs, trajectories

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
