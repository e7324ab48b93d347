"""The schema that records have when they are opened: made, migrated, or refused as newer than this version."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy import Connection, Engine, func, insert, inspect, select, update
from sqlalchemy.exc import SQLAlchemyError

from ...errors import StoreError
from .backup import back_up
from .migrate_1_to_2 import migrate_1_to_2
from .tables import SCHEMA, expired, meta, metadata, trajectories
from .writer import store_error

log = logging.getLogger(__name__)

MIGRATIONS: dict[int, Callable[[Connection], None]] = {1: migrate_1_to_2}
"""Schema -> what makes the next one of it."""


def prepare(engine: Engine, where: str) -> None:
    """Make the tables, or bring those of an older version to this schema. Raises StoreError, or SQLAlchemyError when the
    database does not answer."""
    with engine.begin() as connection:
        if not inspect(connection).has_table("meta"):
            metadata.create_all(connection)
            connection.execute(insert(meta).values(key="schema", value=str(SCHEMA)))
            return
        stored = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar()
    if stored is None or int(stored) > SCHEMA:
        raise StoreError(
            f"the records at {where} have schema {stored!r}, and this version of understudy knows up to {SCHEMA}: "
            "upgrade understudy, or keep records elsewhere (--dir or --store-url)"
        )
    if int(stored) < SCHEMA:
        _migrate(engine, where, int(stored))
    expired.create(engine, checkfirst=True)


def _migrate(engine: Engine, where: str, schema: int) -> None:
    """All or nothing, in one transaction, after a copy was made."""
    copy = back_up(engine, where, schema)
    kept = f"a copy is at {copy}" if copy else "no copy was made"
    try:
        with engine.begin() as connection:
            for each in range(schema, SCHEMA):
                MIGRATIONS[each](connection)
            connection.execute(update(meta).where(meta.c.key == "schema").values(value=str(SCHEMA)))
            count = connection.scalar(select(func.count()).select_from(trajectories))
    except Exception as error:  # the boundary of a migration: whatever stopped it, the records are as they were
        fault = store_error(error, "migrate", where) if isinstance(error, SQLAlchemyError) else None
        message = fault or f"could not migrate records at {where}: {type(error).__name__}: {error}"
        kind = type(fault) if fault else StoreError
        raise kind(f"{message}. Nothing was changed: they still have schema {schema}, and {kept}") from error
    log.info(
        "Records at %s were brought from schema %d to %d (%d trajectories); %s", where, schema, SCHEMA, count, kept
    )
