"""Reads runs, steps, rollouts, train requests and logged metrics, from indexes where possible.

A run, step or group of None stands for the rollouts without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import orjson
from sqlalchemy import ColumnElement, Connection, Row, case, func, select, union

from offbook.base.types import Json
from offbook.base.wire import LogRequest

from .claims import chunks
from .tables import calls, logs, outputs, trains, trajectories


@dataclass(frozen=True)
class RunRow:
    """A run: its number of rollouts, and the `seq` of the first and the last finished one.

    `model`, `step` and `ended_at` (unix seconds) are those of the first rollout. `trains`: it has rollouts to train on,
    whose split is not that of an evaluation."""

    run: str | None
    rollouts: int
    first: int
    last: int
    model: str
    step: int | None
    ended_at: float
    trains: bool


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of one step and split of a run. `reward` is the mean of the scored ones, None without any."""

    step: int | None
    split: str | None
    rollouts: int
    scored: int
    failed: int
    reward: float | None
    ended_at: float


@dataclass(frozen=True)
class ToolTime:
    """A tool's run. Times are unix seconds by the client's clock."""

    name: str
    started_at: float
    ended_at: float
    error: str | None


@dataclass(frozen=True)
class RolloutRow:
    """The fields of a finished rollout that lists show. Times are unix seconds."""

    seq: int
    id: str
    model: str
    run: str | None
    split: str | None
    step: int | None
    scenario: str | None
    group: str | None
    index: int | None
    reward: float | None
    failed: bool
    started_at: float
    ended_at: float
    metrics: dict[str, float]
    exception: str | None  # the exception's type
    message: str  # the exception's text
    tools: tuple[ToolTime, ...] = ()


@dataclass(frozen=True)
class CallTimes:
    """Start and end of a trajectory's call in unix seconds, and its number of sampled tokens."""

    trajectory: str
    call: str
    started_at: float
    ended_at: float
    tokens: int


LISTED: tuple[ColumnElement[Json], ...] = (
    *(trajectories.c.seq, trajectories.c.id, trajectories.c.model, trajectories.c.run, trajectories.c.split),
    *(trajectories.c.step, trajectories.c.scenario, trajectories.c.group_id, trajectories.c.group_index),
    *(trajectories.c.reward, trajectories.c.failed, trajectories.c.ended_at, trajectories.c.body),
)
"""The columns that `rollout_row` reads."""


def run_row(connection: Connection, run: str | None) -> RunRow | None:
    """One run; None if it has no rollouts."""
    return next(iter(run_rows(connection, _of_run(run))), None)


def run_rows(connection: Connection, *chosen: ColumnElement[bool]) -> list[RunRow]:
    """The runs with rollouts that meet the conditions, most recently active first."""
    seq, run = trajectories.c.seq, trajectories.c.run
    ends = (
        select(run, func.count().label("count"), func.min(seq).label("first"), func.max(seq).label("last"))
        .where(*chosen)
        .group_by(run)
        .subquery()
    )
    first, other = trajectories.alias(), trajectories.alias()
    trains = (
        select(other.c.seq)
        .where(other.c.run.is_not_distinct_from(ends.c.run), func.coalesce(other.c.split, "train") == "train")
        .exists()
    )
    query = (
        select(*ends.c, first.c.model, first.c.step, first.c.ended_at, trains)
        .join(first, first.c.seq == ends.c.first)
        .order_by(ends.c.last.desc())
    )
    return [RunRow(*row) for row in connection.execute(query)]


def newest_reward(connection: Connection, row: RunRow) -> float | None:
    """The mean reward of a run's scored rollouts that are of the step and split of its last one; None without any."""
    columns, last = trajectories.c, trajectories.alias()
    query = (
        select(func.avg(columns.reward))
        .join(last, columns.step.is_not_distinct_from(last.c.step) & columns.split.is_not_distinct_from(last.c.split))
        .where(_of_run(row.run), last.c.seq == row.last)
    )
    return connection.scalar(query)


def step_rows(connection: Connection, run: str | None) -> list[StepRollouts]:
    """The steps and splits of a run, newest step first."""
    columns, failed = trajectories.c, case((trajectories.c.failed, 1), else_=0)
    query = (
        select(
            *(columns.step, columns.split, func.count(), func.count(columns.reward), func.sum(failed)),
            *(func.avg(columns.reward), func.max(columns.ended_at)),
        )
        .where(_of_run(run))
        .group_by(columns.step, columns.split)
        .order_by(columns.step.desc(), columns.split)
    )
    return [StepRollouts(*row) for row in connection.execute(query)]


def steps_around(connection: Connection, run: str | None, step: int) -> tuple[int | None, int | None]:
    """The run's steps before and after `step`; None if there is no such step."""
    number = trajectories.c.step
    before = connection.scalar(select(func.max(number)).where(_of_run(run), number < step))
    after = connection.scalar(select(func.min(number)).where(_of_run(run), number > step))
    return before, after


def rollouts_of_step(connection: Connection, run: str | None, step: int | None) -> list[RolloutRow]:
    """The rollouts of a step, of all splits, in order of finishing."""
    query = select(*LISTED).where(_of_run(run), trajectories.c.step == step).order_by(trajectories.c.seq)
    return [rollout_row(row) for row in connection.execute(query)]


def rollouts_of_group(connection: Connection, run: str | None, group: str) -> list[RolloutRow]:
    """The rollouts of a group of a run, sorted by their index in the group."""
    query = select(*LISTED).where(trajectories.c.group_id == group)
    rollouts = [rollout_row(row) for row in connection.execute(query) if row.run == run]
    return sorted(rollouts, key=lambda rollout: (rollout.index is None, rollout.index, rollout.seq))


def rollouts_at(connection: Connection, numbers: Iterable[int]) -> dict[int, RolloutRow]:
    """The rollouts with these numbers (`seq`), by number."""
    rollouts: dict[int, RolloutRow] = {}
    for chunk in chunks(list(numbers)):
        rows = connection.execute(select(*LISTED).where(trajectories.c.seq.in_(chunk)))
        rollouts |= {row.seq: rollout_row(row) for row in rows}
    return rollouts


def rollouts_by_id(connection: Connection, ids: Sequence[str]) -> dict[str, RolloutRow]:
    """Finished rollouts by id; unknown and unfinished ones are left out."""
    rollouts: dict[str, RolloutRow] = {}
    for chunk in chunks(list(ids)):
        rows = connection.execute(select(*LISTED).where(trajectories.c.id.in_(chunk)))
        rollouts |= {row.id: rollout_row(row) for row in rows}
    return rollouts


def train_states(connection: Connection) -> list[tuple[str, str]]:
    """Id and state of every train request, oldest first."""
    query = select(trains.c.id, trains.c.state).order_by(trains.c.created_at, trains.c.id)
    return [(row.id, row.state) for row in connection.execute(query)]


def train_rows(connection: Connection, ids: Sequence[str]) -> list[Row[Json]]:
    """Rows of the table `trains`; unknown ids are left out."""
    return [row for chunk in chunks(ids) for row in connection.execute(select(trains).where(trains.c.id.in_(chunk)))]


def log_rows(connection: Connection, after: int) -> list[Row[Json]]:
    """Rows of the table `logs` with a larger id than `after`, oldest first."""
    return list(connection.execute(select(logs).where(logs.c.id > after).order_by(logs.c.id)))


def model_logs(connection: Connection, model: str) -> list[LogRequest]:
    """The metrics that the user logged for a model, oldest first."""
    rows = connection.execute(select(logs.c.body).where(logs.c.model == model).order_by(logs.c.id))
    return [LogRequest.model_validate_json(row.body) for row in rows]


def call_times(connection: Connection, ids: Sequence[str]) -> list[CallTimes]:
    """The calls that named these trajectories or whose choices they claim, in order of start.

    A call appears once per trajectory.
    """
    times: list[CallTimes] = []
    size = func.coalesce(func.sum(func.length(outputs.c.token_ids)), 0)
    for chunk in chunks(list(ids)):
        own = select(calls.c.trajectory_id.label("owner"), calls.c.id).where(calls.c.trajectory_id.in_(chunk))
        claimed = select(outputs.c.claimed_by.label("owner"), outputs.c.call_id.label("id")).where(
            outputs.c.claimed_by.in_(chunk)
        )
        owned = union(own, claimed).subquery()
        query = (
            select(owned.c.owner, calls.c.id, calls.c.started_at, calls.c.ended_at, size)
            .join(calls, calls.c.id == owned.c.id)
            .outerjoin(outputs, outputs.c.call_id == calls.c.id)
            .group_by(owned.c.owner, calls.c.id, calls.c.started_at, calls.c.ended_at)
            .order_by(calls.c.started_at, calls.c.id)
        )
        times += [CallTimes(*row[:4], tokens=row[4] // 4) for row in connection.execute(query)]
    return times


def rollout_row(row: Row[Json]) -> RolloutRow:
    """Build a RolloutRow from a row of the table `trajectories` with the columns `LISTED`."""
    body: dict[str, Json] = orjson.loads(row.body)
    error: dict[str, str] = body.get("exception") or {}
    return RolloutRow(
        seq=row.seq,
        id=row.id,
        model=row.model,
        run=row.run,
        split=row.split,
        step=row.step,
        scenario=row.scenario,
        group=row.group_id,
        index=row.group_index,
        reward=row.reward,
        failed=bool(row.failed),
        started_at=body["started_at"],
        ended_at=row.ended_at,
        metrics=body.get("metrics") or {},
        exception=error.get("type"),
        message=error.get("message") or "",
        tools=tuple(
            ToolTime(run["name"], run["started_at"], run["ended_at"], run.get("error"))
            for run in body.get("tool_runs") or ()
        ),
    )


def _of_run(run: str | None) -> ColumnElement[bool]:
    return trajectories.c.run.is_(None) if run is None else trajectories.c.run == run
