"""Lists finished trajectories. Every filter has an index, and a page stays the same while new rollouts finish."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Select, and_, case, not_, select

from offbook.base.types import Json
from offbook.base.wire import TrajectoryPage, TrajectoryQuery, TrajectoryRecord

from .tables import trajectories, trajectory_models

DRIVING: tuple[tuple[str, ...], ...] = (
    ("group",),
    ("groups",),
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
"""Sets of filters that have an index, usually the most selective first.

The first set that a query contains selects the index; the query's other filters are tested on the rows read from it. The
choice is made here because the database, without statistics, would guess.
"""

_COLUMNS = {name: trajectories.c[name] for name in ("run", "split", "step", "scenario")} | {
    "group": trajectories.c.group_id
}


def page(connection: Connection, query: TrajectoryQuery) -> TrajectoryPage:
    """A page of the trajectories that match the query, last finished first. `query.after` continues an earlier page."""
    rows = connection.execute(statement(query).limit(query.limit + 1)).all()
    records = [TrajectoryRecord.model_validate_json(row.body) for row in rows[: query.limit]]
    more = len(rows) > query.limit
    return TrajectoryPage(trajectories=tuple(records), next=str(rows[query.limit - 1].seq) if more else None)


def statement(query: TrajectoryQuery) -> Select[int, str]:
    """The SQL of a query, without its limit."""
    filters: dict[str, Json] = {name: getattr(query, name) for name in (*_COLUMNS, "model")}
    filters |= {"failed": query.failed or None, "unscored": query.scored is False or None}
    filters["groups"] = query.groups or None
    wanted = {name: value for name, value in filters.items() if value is not None}
    driving = next(names for names in DRIVING if wanted.keys() >= set(names))
    seq = trajectory_models.c.seq if driving == ("model",) else trajectories.c.seq
    conditions = [_indexed(name, wanted[name]) for name in driving]
    conditions += [_tested(name, value) for name, value in wanted.items() if name not in driving]
    if query.failed is False:
        conditions.append(not_(trajectories.c.failed))
    if query.scored:
        conditions.append(trajectories.c.reward.is_not(None))
    if query.after is not None:
        conditions.append(seq < int(query.after))
    return select(seq, trajectories.c.body).where(*conditions).order_by(seq.desc())


def _indexed(name: str, value: Json) -> ColumnElement[bool]:
    """A condition that the database can answer from an index."""
    if name == "failed":
        return trajectories.c.failed
    if name == "unscored":
        return trajectories.c.reward.is_(None)
    if name == "groups":
        return trajectories.c.group_id.in_(value)
    if name == "model":
        return and_(trajectory_models.c.model == value, trajectory_models.c.seq == trajectories.c.seq)
    return _COLUMNS[name] == value


def _tested(name: str, value: Json) -> ColumnElement[bool]:
    """The same condition in a form that matches no index, so that the database does not choose another index."""
    if name == "failed":
        return case((trajectories.c.failed, 1), else_=0) == 1
    if name == "unscored":
        return case((trajectories.c.reward.is_(None), 1), else_=0) == 1
    if name == "groups":
        return (trajectories.c.group_id + "").in_(value)
    if name == "model":
        own = and_(trajectory_models.c.seq == trajectories.c.seq, trajectory_models.c.model == value)
        return select(trajectory_models.c.seq).where(own).exists()
    return _COLUMNS[name] + (0 if name == "step" else "") == value
