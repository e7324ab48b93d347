"""Notes: short texts that the records keep under a key, such as of ended runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sqlalchemy import Connection, insert, select, update

from offbook.base.errors import OffbookError

from .tables import meta


def save_notes(connection: Connection, batch: Sequence[tuple[str, str]]) -> list[OffbookError | None]:
    """Store a text under each key, replacing the one before."""
    for key, text in dict(batch).items():
        if not connection.execute(update(meta).where(meta.c.key == key).values(value=text)).rowcount:
            connection.execute(insert(meta).values(key=key, value=text))
    return [None] * len(batch)


def kept_note(key: str, text: str) -> tuple[str, str]:
    """A note for `save_notes` that keeps a text that does not read back, so that a person can look at it."""
    return f"damaged:{key}"[:64], text


def read_note(connection: Connection, key: str) -> str | None:
    """The text that `save_notes` stored under a key; None if there is none."""
    return connection.scalar(select(meta.c.value).where(meta.c.key == key))


def end_note(run: str) -> str:
    """The key of the note that says when a run was over. A run's name may be longer than a key."""
    return "ended:" + hashlib.sha256(run.encode()).hexdigest()[:48]


def ended_at(connection: Connection, run: str | None) -> float | None:
    """When a run was over, as its trainer said; None if it did not."""
    note = read_note(connection, end_note(run)) if run is not None else None
    return float(note) if note is not None else None
