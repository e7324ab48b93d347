"""Opens the records: engines that read and write, records that are only read, and the check of a SQLite file, so that no
foreign, damaged or lost records are overwritten."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection, QueuePool

from offbook.base.errors import ConfigError, StoreError
from offbook.base.types import Json

from ...engine.checkpoint_files import is_file, not_checked
from .tables import check_schema
from .writer import store_error

RECORDS = "records.db"
"""The file in a server's directory."""


def engine_at(file: Path, connections: int, *, durable: bool = False) -> Engine:
    """An engine that reads and writes, with at most `connections` pooled connections. With `durable`, SQLite syncs its log to
    disk at every commit."""
    engine = create_engine(URL.create("sqlite", database=str(file)), pool_size=connections, pool_use_lifo=True)
    event.listen(engine, "connect", partial(_configure, "FULL" if durable else "NORMAL"))
    engine.dialect.do_begin = _begin
    return engine


def read_only_engine_at(file: Path, connections: int, *, immutable: bool = False) -> Engine:
    """Like `engine_at`, for an engine that cannot write. A server may write to the same file meanwhile.

    `immutable` is for a file on a read-only disk, where SQLite cannot even create the index of its log.
    """
    uri = f"file:{quote(str(file.absolute()))}?{'immutable=1' if immutable else 'mode=ro'}"
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, check_same_thread=False),
        poolclass=QueuePool,
        pool_size=connections,
        pool_use_lifo=True,
    )
    event.listen(engine, "connect", _reject_writes)
    engine.dialect.do_begin = _begin
    return engine


def _configure(synchronous: str, connection: Json, entry: ConnectionPoolEntry) -> None:
    """Set WAL mode and turn off the driver's own transactions, which do not cover DDL and reads."""
    del entry
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", f"synchronous={synchronous}", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _reject_writes(connection: Json, entry: ConnectionPoolEntry) -> None:
    del entry
    connection.isolation_level = None
    for pragma in ("query_only=1", "busy_timeout=10000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(dbapi_connection: PoolProxiedConnection) -> None:
    """Replaces the dialect's `do_begin`. A listener for "begin" would slow down every statement in SQLAlchemy."""
    dbapi_connection.cursor().execute("BEGIN")


APPLICATION_ID = 0x4F464642  # "OFFB"
CHECKED_BYTES = 2**30
"""Larger files are not checked at start, which would read the whole file; `offbook verify` checks them."""
_MAGIC = b"SQLite format 3\0"
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""The result codes of SQLite that are about a file's content. All others are about the disk, a lock or the account."""
LOCK_SECONDS = 10.0
"""How long a check waits for the lock of another program."""


def check_file(path: Path, *, may_begin: bool = False) -> None:
    """Raise StoreError if the file must not be opened: it is foreign or damaged, cannot be checked, or is empty or missing
    although checkpoints exist. With `may_begin` a missing one is no fault: a server that does not train repeats no step.
    """
    if may_begin and not any(path.with_name(path.name + end).exists() for end in ("", "-wal")):
        return
    problem = fault_of(path, "quick_check" if path.exists() and path.stat().st_size <= CHECKED_BYTES else None)
    if problem is not None:
        raise StoreError(
            f"the records at {path} cannot be used: {problem}. Restore them from a backup, or run `offbook verify "
            f"--dir {path.parent} --repair` to move them aside and start new ones"
        )


def fault_of(path: Path, check: str | None) -> str | None:
    """What is wrong with a file of records; None if nothing is, or there is no file and there are no checkpoints.

    `check` is SQLite's quick_check or integrity_check; with None the contents are not checked. Raises StoreError if the
    file cannot be checked, such as on a full disk or while another program locks it.
    """
    try:
        if not is_file(path):
            return _missing(path)
        # A file with a journal is incomplete after a power loss; SQLite repairs it when it opens the file.
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
        if not head:
            return "the file is empty, but there are checkpoints" if _has_checkpoints(path.parent) else None
        if head != _MAGIC and not path.with_name(f"{path.name}-journal").exists():
            return "it is not a SQLite database"
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS)) as connection:
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")  # of damaged pages
            return _foreign(connection) or (_damaged(connection, check) if check else None)
    except sqlite3.Error as error:
        if _is_damage(getattr(error, "sqlite_errorcode", 0)):
            return str(error)
        raise not_checked(path, error) from error
    except (OSError, MemoryError) as error:
        raise not_checked(path, error) from error


def _foreign(connection: sqlite3.Connection) -> str | None:
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if owner not in (0, APPLICATION_ID):
        return f"it belongs to another program (application_id {owner:#x})"
    return (
        f"its tables are not Offbook's ({', '.join(sorted(tables)[:5])})" if tables and "meta" not in tables else None
    )


def _damaged(connection: sqlite3.Connection, check: str) -> str | None:
    lines = [line for (line,) in connection.execute(f"PRAGMA {check}(3)")]
    # A page that cannot be read is a line with SQLite's result code.
    codes = [int(code) for line in lines for code in re.findall(r"error code[ =](\d+)", line)]
    if any(not _is_damage(code) for code in codes):
        raise sqlite3.OperationalError("; ".join(lines))
    return None if lines == ["ok"] else "it is damaged: " + "; ".join(lines)


def _is_damage(code: int) -> bool:
    """Whether a result code, which may be an extended one, says that the file's content is damaged."""
    return code & 0xFF in _DAMAGE


def _missing(path: Path) -> str | None:
    if path.exists():
        return "it is not a regular file"
    if path.with_name(f"{path.name}-wal").exists():
        return f"the file is missing, but its log {path.name}-wal is there"
    return "the file is missing, but there are checkpoints" if _has_checkpoints(path.parent) else None


def _has_checkpoints(folder: Path) -> bool:
    return next(folder.glob("*/models/*/checkpoints/*/offbook.json"), None) is not None


R = TypeVar("R")

_READERS = 4


class Readable(Protocol):
    """Records that can be read: a server's Store, or ReadOnlyRecords."""

    async def read(self, read: Callable[[Connection], R]) -> R:
        """Call `read` with a connection in another thread, and return its result. Raises StoreError."""
        ...


class ReadOnlyRecords:
    """Records without the directory's lock. They cannot be written."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self._file = file
        self._readers = ThreadPoolExecutor(_READERS, "offbook-read")

    @classmethod
    def open(cls, file: Path, *, briefly: bool = False) -> ReadOnlyRecords:
        """Open a file of records. `briefly`: for one look at them, which leaves no files beside records that no server has open.

        Raises StoreError if there are none, or the file is damaged, belongs to another program, or has another schema.
        """
        if not file.is_file():
            raise StoreError(f"there are no records at {file}: name the directory of a server that has run")
        immutable = briefly and not file.with_name(f"{file.name}-wal").exists()
        engine = read_only_engine_at(file, _READERS, immutable=immutable)
        try:
            try:
                _check_schema(engine, file)
            except OperationalError:  # a read-only disk
                engine.dispose()
                engine = read_only_engine_at(file, _READERS, immutable=True)
                _check_schema(engine, file)
        except SQLAlchemyError as error:
            engine.dispose()
            raise store_error(error, "open", file) from error
        except StoreError:
            engine.dispose()
            raise
        return cls(engine, file)

    async def read(self, read: Callable[[Connection], R]) -> R:
        """Call `read` with a connection in a reader thread, and return its result. Raises StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._reading, read)

    def close(self) -> None:
        """Close all connections. Blocks until running reads have ended."""
        self._readers.shutdown()
        self._engine.dispose()

    def _reading(self, read: Callable[[Connection], R]) -> R:
        try:
            with self._engine.connect() as connection:
                return read(connection)
        except SQLAlchemyError as error:
            raise store_error(error, "read", self._file) from error


def open_records(folder: Path, *, briefly: bool = False) -> ReadOnlyRecords:
    """Open the records of a server's directory, as `ReadOnlyRecords.open`. Raises ConfigError if the folder has none, StoreError."""
    file = folder / RECORDS
    if file.is_file():
        return ReadOnlyRecords.open(file, briefly=briefly)
    if not folder.exists():
        raise ConfigError(
            f"there is no folder {folder}: give the directory of a server, as in --dir offbook-quickstart/server"
        )
    inside = sorted(path.parent for pattern in (f"*/{RECORDS}", f"*/*/{RECORDS}") for path in folder.glob(pattern))
    hint = ": it is not the directory of a server, or its server has not started yet"
    raise ConfigError(f"{folder} has no {RECORDS}{f'; there are records in {inside[0]}' if inside else hint}")


def _check_schema(engine: Engine, file: Path) -> None:
    with engine.connect() as connection:
        if not inspect(connection).has_table("meta"):
            raise StoreError(f"the database at {file} has no records of Offbook: check the path")
        check_schema(connection, file)
