"""Searches finished trajectories, newest first, for a limited time per page."""

from __future__ import annotations

import time
from dataclasses import dataclass

import orjson
from sqlalchemy import ColumnElement, Connection, Select, and_, func, or_, select

from offbook.base.types import Json

from .overview import LISTED, RolloutRow, rollout_row
from .tables import calls, outputs, trajectories, trajectory_models

SLICE = 500
"""Trajectories searched between two checks of the time."""


@dataclass(frozen=True)
class RolloutFilter:
    """What to search for. None and "" turn a filter off.

    * `lowest`, `highest`: bounds of the reward, inclusive.
    * `text`: part of an answer, message, metadata, log or error, without regard to the case of ASCII letters.
    * `tool`: the name of a called tool.
    * `exception`: part of the type of the exception.
    """

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
        """Whether a filter needs the contents of rows, not only an index."""
        return bool(self.exception or self.tool or self.text)


@dataclass(frozen=True)
class SearchPage:
    """A page of search results.

    `next` is the `after` of the next page, None at the end. `searched` of `total` trajectories were searched. `timed_out`
    is true if the time ended before the page was full.
    """

    rollouts: tuple[RolloutRow, ...]
    next: int | None
    searched: int
    total: int
    timed_out: bool


def search(
    connection: Connection, wanted: RolloutFilter, after: int | None = None, limit: int = 50, seconds: float = 0.12
) -> SearchPage:
    """A page of the trajectories that match, last finished first, beginning after the number `after` (`seq`).

    The search stops after about `seconds`, or with `limit` results.
    """
    began = time.monotonic()
    newest = connection.scalar(select(func.max(trajectories.c.seq))) or 0
    upper = newest if after is None else after - 1
    rollouts: list[RolloutRow] = []
    searched, position, timed_out = 0, upper, False
    while position > 0 and len(rollouts) < limit:
        lower = max(0, position - SLICE) if wanted.reads_text else 0
        query = _matching(connection, wanted).where(trajectories.c.seq <= position, trajectories.c.seq > lower)
        rows = connection.execute(query.order_by(trajectories.c.seq.desc()).limit(limit - len(rollouts))).all()
        rollouts += [rollout_row(row) for row in rows]
        reached = rows[-1].seq - 1 if len(rollouts) >= limit else lower
        searched += position - reached
        position = reached
        if time.monotonic() - began > seconds and position > 0 and len(rollouts) < limit:
            timed_out = True
            break
    return SearchPage(tuple(rollouts), position + 1 if position > 0 else None, searched, upper, timed_out)


def _matching(connection: Connection, wanted: RolloutFilter) -> Select[Json]:
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
        own = and_(trajectory_models.c.seq == columns.seq, trajectory_models.c.model == wanted.model)
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


def _recorded(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether the condition holds for a call that named the trajectory, or whose choice the trajectory claims."""
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
    connection: Connection, column: ColumnElement[str], before: str, text: str, *, raw: bool = False
) -> ColumnElement[bool]:
    """Whether the column contains `before` and then the text, escaped as in JSON unless `raw`.

    SQLite's LIKE ignores the case of ASCII letters; PostgreSQL needs ILIKE.
    """
    inner = text if raw else _json(text)[1:-1]
    escaped = inner.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    pattern = f"%{before}{escaped}%"
    if connection.dialect.name == "postgresql":
        return column.ilike(pattern, escape="\\")
    return column.like(pattern, escape="\\")


def _json(text: str) -> str:
    return orjson.dumps(text).decode()
