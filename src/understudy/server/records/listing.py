"""Lists of finished trajectories: every filter has an index, and pages stay put while rollouts arrive."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import Connection, select

from ...types import Json
from ...wire import TrajectoryPage, TrajectoryQuery, TrajectoryRecord
from .tables import trajectories, trajectory_models

DRIVING: tuple[tuple[str, ...], ...] = (
    ("group",),
    ("scenario",),
    ("run", "step"),
    ("failed",),
    ("unscored",),
    ("run", "split"),
    ("run",),
    ("step",),
    ("split",),
    ("model",),
    (),
)
"""Sets of filters that have an index, those that as a rule leave the fewest rollouts first. The first that a query has
decides which rows are read; its other filters are tested on these. Without statistics a database would guess."""

_COLUMNS = {name: trajectories.c[name] for name in ("run", "split", "step", "scenario")} | {
    "group": trajectories.c.group_id
}


def page(connection: Connection, query: TrajectoryQuery) -> TrajectoryPage:
    """The trajectories that fit, the last finished first, from where the page before ended."""
    rows = connection.execute(statement(query).limit(query.limit + 1)).all()
    records = [TrajectoryRecord.model_validate_json(row.body) for row in rows[: query.limit]]
    more = len(rows) > query.limit
    return TrajectoryPage(trajectories=tuple(records), next=str(rows[query.limit - 1].seq) if more else None)


def statement(query: TrajectoryQuery) -> sa.Select[int, str]:
    """What a query asks of the database, without its limit."""
    filters: dict[str, Json] = {name: getattr(query, name) for name in (*_COLUMNS, "model")}
    filters |= {"failed": query.failed or None, "unscored": query.scored is False or None}
    wanted = {name: value for name, value in filters.items() if value is not None}
    driving = next(names for names in DRIVING if wanted.keys() >= set(names))
    seq = trajectory_models.c.seq if driving == ("model",) else trajectories.c.seq
    conditions = [_indexed(name, wanted[name]) for name in driving]
    conditions += [_tested(name, value) for name, value in wanted.items() if name not in driving]
    if query.failed is False:
        conditions.append(sa.not_(trajectories.c.failed))
    if query.scored:
        conditions.append(trajectories.c.reward.is_not(None))
    if query.after is not None:
        conditions.append(seq < int(query.after))
    return select(seq, trajectories.c.body).where(*conditions).order_by(seq.desc())


def _indexed(name: str, value: Json) -> sa.ColumnElement[bool]:
    """A condition as an index has it."""
    if name == "failed":
        return trajectories.c.failed
    if name == "unscored":
        return trajectories.c.reward.is_(None)
    if name == "model":
        return sa.and_(trajectory_models.c.model == value, trajectory_models.c.seq == trajectories.c.seq)
    return _COLUMNS[name] == value


def _tested(name: str, value: Json) -> sa.ColumnElement[bool]:
    """The same condition in words that no index has."""
    if name == "failed":
        return sa.case((trajectories.c.failed, 1), else_=0) == 1
    if name == "unscored":
        return sa.case((trajectories.c.reward.is_(None), 1), else_=0) == 1
    if name == "model":
        own = sa.and_(trajectory_models.c.seq == trajectories.c.seq, trajectory_models.c.model == value)
        return select(trajectory_models.c.seq).where(own).exists()
    return _COLUMNS[name] + (0 if name == "step" else "") == value
