"""Creates SQLAlchemy engines for the records: one that reads and writes, and one that only reads."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool

from offbook.base.errors import StoreError
from offbook.base.types import Json


def engine_at(url: str, connections: int, *, durable: bool = False) -> tuple[Engine, str]:
    """An engine that reads and writes, with at most `connections` pooled connections, and its location for messages.

    With `durable`, SQLite syncs its log to disk at every commit; PostgreSQL always does. Raises StoreError if the URL is
    invalid, its database is in memory, or its driver is not installed.
    """
    parsed, where = _parsed(url)
    engine = _engine(parsed, where, connections)
    if parsed.get_backend_name() == "sqlite":
        event.listen(engine, "connect", partial(_configure_sqlite, "FULL" if durable else "NORMAL"))
        engine.dialect.do_begin = _begin_sqlite
    return engine, where


def read_only_engine_at(url: str, connections: int, *, immutable: bool = False) -> tuple[Engine, str]:
    """Like `engine_at`, for an engine that cannot write. A server may write to the same database meanwhile.

    `immutable` is for a SQLite file on a read-only disk, where SQLite cannot even create the index of its log.
    """
    parsed, where = _parsed(url)
    if parsed.get_backend_name() != "sqlite":
        engine = _engine(parsed, where, connections)
        event.listen(engine, "connect", _reject_postgres_writes)
        return engine, where
    mode = "immutable=1" if immutable else "mode=ro"
    uri = f"file:{quote(str(Path(where).absolute()))}?{mode}"
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, check_same_thread=False),
        poolclass=QueuePool,
        pool_size=connections,
        pool_use_lifo=True,
    )
    event.listen(engine, "connect", _reject_sqlite_writes)
    engine.dialect.do_begin = _begin_sqlite
    return engine, where


def _parsed(url: str) -> tuple[URL, str]:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(f"store_url {url!r} is not a SQLAlchemy URL, such as sqlite:////srv/records.db") from error
    sqlite = parsed.get_backend_name() == "sqlite"
    where = (parsed.database or "") if sqlite else parsed.render_as_string(hide_password=True)
    if sqlite and where in ("", ":memory:"):
        raise StoreError(f"store_url {url!r} keeps records in memory, where they would be lost: name a file")
    return parsed, where


def _engine(parsed: URL, where: str, connections: int) -> Engine:
    sqlite = parsed.get_backend_name() == "sqlite"
    try:
        return create_engine(parsed, pool_size=connections, pool_pre_ping=not sqlite, pool_use_lifo=True)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"the driver of {where} is not installed ({error}): install it with pip, for example "
            "`pip install 'psycopg[binary]'` for postgresql+psycopg://"
        ) from error
    except SQLAlchemyError as error:
        raise StoreError(f"store_url {where!r} cannot be used: {error}") from error


def _configure_sqlite(synchronous: str, connection: Json, entry: ConnectionPoolEntry) -> None:
    """Set WAL mode and turn off the driver's own transactions, which do not cover DDL and reads."""
    del entry
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _reject_sqlite_writes(connection: Json, entry: ConnectionPoolEntry) -> None:
    del entry
    connection.isolation_level = None
    for pragma in ("query_only=1", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _reject_postgres_writes(connection: Json, entry: ConnectionPoolEntry) -> None:
    del entry
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    connection.commit()


def _begin_sqlite(dbapi_connection: PoolProxiedConnection) -> None:
    """Replaces the dialect's `do_begin`. A listener for "begin" would slow down every statement in SQLAlchemy."""
    dbapi_connection.cursor().execute("BEGIN")
