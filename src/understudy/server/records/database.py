"""The database behind the records: a SQLAlchemy engine for its URL, for writing or for reading only."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import Engine, event
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool

from ...errors import StoreError
from ...types import Json


def engine_at(url: str, connections: int, *, durable: bool = False) -> tuple[Engine, str]:
    """An engine that reads and writes, and its place as shown in messages. `durable`: SQLite syncs its log at every
    commit; PostgreSQL does so by itself. Raises StoreError."""
    parsed, where = _parsed(url)
    engine = _engine(parsed, where, connections)
    if parsed.get_backend_name() == "sqlite":
        event.listen(engine, "connect", partial(_configure_sqlite, "FULL" if durable else "NORMAL"))
        engine.dialect.do_begin = _begin_sqlite
    return engine, where


def read_only_engine_at(url: str, connections: int, *, immutable: bool = False) -> tuple[Engine, str]:
    """The same for an engine that cannot write, also beside a server that does. `immutable`: an SQLite file on a disk
    that takes no writes at all, not even SQLite's index of its log. Raises StoreError."""
    parsed, where = _parsed(url)
    if parsed.get_backend_name() != "sqlite":
        engine = _engine(parsed, where, connections)
        event.listen(engine, "connect", _refuse_postgres_writes)
        return engine, where
    mode = "immutable=1" if immutable else "mode=ro"
    uri = f"file:{quote(str(Path(where).absolute()))}?{mode}"
    engine = sa.create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, check_same_thread=False),
        poolclass=QueuePool,
        pool_size=connections,
        pool_use_lifo=True,
    )
    event.listen(engine, "connect", _refuse_sqlite_writes)
    engine.dialect.do_begin = _begin_sqlite
    return engine, where


def _parsed(url: str) -> tuple[sa.URL, str]:
    try:
        parsed = sa.make_url(url)
    except ArgumentError as error:
        raise StoreError(f"store_url {url!r} is no SQLAlchemy URL, such as sqlite:////srv/records.db") from error
    sqlite = parsed.get_backend_name() == "sqlite"
    where = (parsed.database or "") if sqlite else parsed.render_as_string(hide_password=True)
    if sqlite and where in ("", ":memory:"):
        raise StoreError(f"store_url {url!r} keeps records in memory, where they would be lost: give a file")
    return parsed, where


def _engine(parsed: sa.URL, where: str, connections: int) -> Engine:
    sqlite = parsed.get_backend_name() == "sqlite"
    try:
        return sa.create_engine(parsed, pool_size=connections, pool_pre_ping=not sqlite, pool_use_lifo=True)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"the driver of {where} is not installed ({error}): pip install it, such as "
            "`pip install 'psycopg[binary]'` for postgresql+psycopg://"
        ) from error
    except SQLAlchemyError as error:
        raise StoreError(f"store_url {where!r} cannot be used: {error}") from error


def _configure_sqlite(synchronous: str, connection: Json, entry: ConnectionPoolEntry) -> None:
    """WAL, and transactions that we begin ourselves: the driver's own begin too late for DDL and reads."""
    del entry
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _refuse_sqlite_writes(connection: Json, entry: ConnectionPoolEntry) -> None:
    del entry
    connection.isolation_level = None
    for pragma in ("query_only=1", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _refuse_postgres_writes(connection: Json, entry: ConnectionPoolEntry) -> None:
    del entry
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    connection.commit()


def _begin_sqlite(dbapi_connection: PoolProxiedConnection) -> None:
    """Not a listener for "begin": with one, SQLAlchemy goes through its events at every statement."""
    dbapi_connection.cursor().execute("BEGIN")
