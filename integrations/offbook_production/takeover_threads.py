"""The threads of a takeover: when each began, which side answers it, and its first score. No text, no name."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Double,
    Integer,
    MetaData,
    String,
    Table,
    delete,
    insert,
    select,
    update,
)

from offbook.base.errors import OffbookError

logger = logging.getLogger(__name__)

metadata = MetaData()
threads = Table(
    "takeover_threads",
    metadata,
    Column("id", String(200), primary_key=True),  # of the thread's trajectory, recorded or not
    Column("takeover", String(64), nullable=False),
    Column("stage", Integer, nullable=False),  # 1: began after the small model took over
    Column("small", Boolean, nullable=False),
    Column("began_at", Double, nullable=False),
    Column("score", Double),
    Column("scored_at", Double),
)


class TakenThread(NamedTuple):
    """A thread, its takeover, whether it began after the small model took over (1), the side that answers it, and when it began
    (unix seconds)."""

    id: str
    takeover: str
    stage: int
    small: bool
    began_at: float


class ThreadScore(NamedTuple):
    """A score of a thread of a takeover, and when it came (unix seconds). `small`: whether the small model answered the call
    that it is on; None: it is on the whole thread."""

    id: str
    takeover: str
    score: float
    scored_at: float
    small: bool | None = None


class ScoredThread(NamedTuple):
    """The thread that a score is for. `first`: it had none before; only its first score is kept."""

    stage: int
    small: bool
    first: bool


def begin_takeover(connection: Connection, batch: Sequence[str]) -> list[OffbookError | None]:
    """Delete the threads of these takeovers, which have ended."""
    connection.execute(delete(threads).where(threads.c.takeover.in_(batch)))
    return [None] * len(batch)


def add_threads(connection: Connection, batch: Sequence[Sequence[TakenThread]]) -> list[OffbookError | None]:
    """Store threads, each sequence of one takeover. One that is there stays as it is, unless an earlier takeover left it."""
    for taken in batch:
        for start in range(0, len(taken), 500):
            rows = taken[start : start + 500]
            mine = threads.c.id.in_([row.id for row in rows])
            connection.execute(delete(threads).where(mine & (threads.c.takeover != rows[0].takeover)))
            known = set(connection.scalars(select(threads.c.id).where(mine)))
            new = {row.id: row._asdict() for row in reversed(rows) if row.id not in known}
            if new:
                connection.execute(insert(threads), list(new.values()))
    return [None] * len(batch)


def score_threads(connection: Connection, batch: Sequence[ThreadScore]) -> list[ScoredThread | OffbookError | None]:
    """Store the first score of each thread; None for a thread that is none of the takeover, and for a score of a call that the
    other side answered."""
    results: list[ScoredThread | OffbookError | None] = []
    for score in batch:
        mine = (threads.c.id == score.id) & (threads.c.takeover == score.takeover)
        row = connection.execute(select(threads.c.stage, threads.c.small, threads.c.score).where(mine)).first()
        if row is None or (score.small is not None and score.small != row.small):
            results.append(None)
            continue
        if row.score is None:
            connection.execute(update(threads).where(mine).values(score=score.score, scored_at=score.scored_at))
        results.append(ScoredThread(row.stage, row.small, row.score is None))
    return results


def read_threads(connection: Connection, takeover: str) -> list[tuple[TakenThread, float | None]]:
    """The threads of a takeover with their scores: first those with a score, in its order. A row whose score is no number is left
    out."""
    query = select(threads).where(threads.c.takeover == takeover)
    rows = connection.execute(
        query.order_by(threads.c.scored_at.is_(None), threads.c.scored_at, threads.c.began_at)
    ).all()
    sound = [row for row in rows if all(map(_finite, (row.score or 0.0, row.scored_at or 0.0)))]
    if len(sound) < len(rows):
        logger.error("takeover %s: %d stored threads do not read back", takeover, len(rows) - len(sound))
    return [(TakenThread(row.id, row.takeover, row.stage, row.small, row.began_at), row.score) for row in sound]


def _finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
