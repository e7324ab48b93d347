"""Brings the schema of records up to date when they are opened. Newer schemas are rejected."""

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

logger = logging.getLogger(__name__)

MIGRATIONS: dict[int, Callable[[Connection], None]] = {1: migrate_1_to_2}
"""Schema -> the function that migrates it to the next one."""


def prepare(engine: Engine, where: str) -> None:
    """Create the tables, or migrate those of an older schema.

    Raises StoreError if the schema is newer or a migration fails, SQLAlchemyError if the database does not respond.
    """
    with engine.begin() as connection:
        if not inspect(connection).has_table("meta"):
            metadata.create_all(connection)
            connection.execute(insert(meta).values(key="schema", value=str(SCHEMA)))
            return
        stored = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar()
    if stored is None or int(stored) > SCHEMA:
        raise StoreError(
            f"the records at {where} have schema {stored!r}, but this version of understudy reads schemas up to {SCHEMA}: "
            "upgrade understudy, or keep records elsewhere (--dir or --store-url)"
        )
    if int(stored) < SCHEMA:
        _migrate(engine, where, int(stored))
    expired.create(engine, checkfirst=True)


def _migrate(engine: Engine, where: str, schema: int) -> None:
    """Copy the records, then migrate them in one transaction."""
    copy = back_up(engine, where, schema)
    backup = f"a copy is at {copy}" if copy else "no copy was made"
    try:
        with engine.begin() as connection:
            for version in range(schema, SCHEMA):
                MIGRATIONS[version](connection)
            connection.execute(update(meta).where(meta.c.key == "schema").values(value=str(SCHEMA)))
            count = connection.scalar(select(func.count()).select_from(trajectories))
    except Exception as error:  # any failure rolls the migration back, and the message says so
        known_error = store_error(error, "migrate", where) if isinstance(error, SQLAlchemyError) else None
        message = known_error or f"could not migrate records at {where}: {type(error).__name__}: {error}"
        error_class = type(known_error) if known_error else StoreError
        raise error_class(f"{message}. The records are unchanged, with schema {schema}; {backup}") from error
    logger.info(
        "Migrated records at %s from schema %d to %d (%d trajectories); %s", where, schema, SCHEMA, count, backup
    )
