"""Searching finished trajectories: newest first, in slices, for a bounded time, from where the page before ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

import orjson
import sqlalchemy as sa
from sqlalchemy import Connection, func, or_, select

from ...types import Json
from .overview import LISTED, RolloutRow, rollout_row
from .tables import calls, outputs, trajectories, trajectory_models

SLICE = 500
"""So many trajectories are looked through before the time is looked at."""


@dataclass(frozen=True)
class RolloutFilter:
    """What to search for; None and "" leave a filter out. `text` is found, without regard to case of ASCII letters, in
    answers, messages, metadata, logs and errors; `tool` is the name of a called one; `exception` a part of its type."""

    run: str | None = None
    model: str | None = None
    split: str | None = None
    step: int | None = None
    scenario: str | None = None
    lowest: float | None = None
    highest: float | None = None
    failed: bool | None = None
    exception: str = ""
    tool: str = ""
    text: str = ""

    @property
    def reads_text(self) -> bool:
        """Whether rows have to be read, not only their index."""
        return bool(self.exception or self.tool or self.text)


@dataclass(frozen=True)
class SearchPage:
    """`next`: where the next page begins; None at the end. `looked`: how many trajectories were looked through, and
    `hurried` whether the time ended before the page was full."""

    rollouts: tuple[RolloutRow, ...]
    next: int | None
    looked: int
    total: int
    hurried: bool


def search(
    connection: Connection, wanted: RolloutFilter, after: int | None = None, limit: int = 50, seconds: float = 0.12
) -> SearchPage:
    """The trajectories that fit, the last finished first, from `after` (exclusive) on."""
    began = time.monotonic()
    newest = connection.scalar(select(func.max(trajectories.c.seq))) or 0
    upper = newest if after is None else after - 1
    found: list[RolloutRow] = []
    looked, at, hurried = 0, upper, False
    while at > 0 and len(found) < limit:
        lower = max(0, at - SLICE) if wanted.reads_text else 0
        query = _matching(connection, wanted).where(trajectories.c.seq <= at, trajectories.c.seq > lower)
        rows = connection.execute(query.order_by(trajectories.c.seq.desc()).limit(limit - len(found))).all()
        found += [rollout_row(row) for row in rows]
        reached = rows[-1].seq - 1 if len(found) >= limit else lower
        looked += at - reached
        at = reached
        if time.monotonic() - began > seconds and at > 0 and len(found) < limit:
            hurried = True
            break
    return SearchPage(tuple(found), at + 1 if at > 0 else None, looked, upper, hurried)


def _matching(connection: Connection, wanted: RolloutFilter) -> sa.Select[Json]:
    columns = trajectories.c
    query = select(*LISTED)
    plain = {
        columns.run: wanted.run,
        columns.split: wanted.split,
        columns.step: wanted.step,
        columns.scenario: wanted.scenario,
        columns.failed: wanted.failed,
    }
    query = query.where(*(column == value for column, value in plain.items() if value is not None))
    if wanted.model:
        own = sa.and_(trajectory_models.c.seq == columns.seq, trajectory_models.c.model == wanted.model)
        query = query.where(select(trajectory_models.c.seq).where(own).exists())
    if wanted.lowest is not None:
        query = query.where(columns.reward >= wanted.lowest)
    if wanted.highest is not None:
        query = query.where(columns.reward <= wanted.highest)
    if wanted.exception:
        query = query.where(columns.failed, _has(connection, columns.body, '"exception":{"type":"%', wanted.exception))
    if wanted.tool:
        query = query.where(
            _recorded(_has(connection, outputs.c.message, "", f'"name":{_json(wanted.tool)}', raw=True))
        )
    if wanted.text:
        in_calls = _recorded(
            or_(
                _has(connection, outputs.c.message, "", wanted.text),
                _has(connection, calls.c.body, "", wanted.text),
            )
        )
        query = query.where(or_(_has(connection, columns.body, "", wanted.text), columns.id == wanted.text, in_calls))
    return query


def _recorded(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """A call that was recorded under the trajectory, or whose choice it claims, fits."""
    under = (
        select(calls.c.id)
        .join(outputs, outputs.c.call_id == calls.c.id, isouter=True)
        .where(calls.c.trajectory_id == trajectories.c.id, condition)
    )
    claimed = (
        select(calls.c.id)
        .join(outputs, outputs.c.call_id == calls.c.id)
        .where(outputs.c.claimed_by == trajectories.c.id, condition)
    )
    return or_(under.exists(), claimed.exists())


def _has(
    connection: Connection, column: sa.ColumnElement[str], before: str, text: str, *, raw: bool = False
) -> sa.ColumnElement[bool]:
    """The column contains the text as JSON writes it. LIKE has no regard to case in SQLite; PostgreSQL has ILIKE."""
    inner = text if raw else _json(text)[1:-1]
    escaped = inner.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    pattern = f"%{before}{escaped}%"
    if connection.dialect.name == "postgresql":
        return column.ilike(pattern, escape="\\")
    return column.like(pattern, escape="\\")


def _json(text: str) -> str:
    return orjson.dumps(text).decode()
