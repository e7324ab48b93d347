"""Creates the tables of records when they are opened, and rejects those of another schema."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, insert, inspect, select

from offbook.base.errors import StoreError

from .tables import SCHEMA, meta, metadata


def prepare(engine: Engine, where: str) -> None:
    """Create the tables if there are none.

    Raises StoreError if the database has another schema, SQLAlchemyError if it does not respond.
    """
    with engine.begin() as connection:
        if inspect(connection).has_table("meta"):
            check_schema(connection, where)
        else:
            metadata.create_all(connection)
            connection.execute(insert(meta).values(key="schema", value=str(SCHEMA)))


def check_schema(connection: Connection, where: str) -> None:
    """Raises StoreError if the records at `where` have another schema than this version's."""
    stored = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar()
    if stored == str(SCHEMA):
        return
    newer = stored is None or int(stored) > SCHEMA
    remedy = (
        "upgrade with `pip install --upgrade offbook`"
        if newer
        else "they were written before the first release: move them away (models and checkpoints stay usable)"
    )
    raise StoreError(
        f"the records at {where} have schema {stored!r}, but this version of offbook reads schema {SCHEMA}: {remedy}, "
        "or keep records elsewhere (--dir or --store-url)"
    )
