"""Opens records for reading only, whether or not a server uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from offbook.base.errors import ConfigError, StoreError

from .database import read_only_engine_at
from .tables import check_schema
from .writer import store_error

R = TypeVar("R")

_READERS = 4


class Readable(Protocol):
    """Records that can be read: a server's Store, or ReadOnlyRecords."""

    async def read(self, read: Callable[[Connection], R]) -> R:
        """Call `read` with a connection in another thread, and return its result. Raises StoreError."""
        ...


class ReadOnlyRecords:
    """Records without the directory's lock. They cannot be written."""

    def __init__(self, engine: Engine, where: str) -> None:
        self._engine = engine
        self._where = where
        self._readers = ThreadPoolExecutor(_READERS, "offbook-read")

    @classmethod
    def open(cls, url: str, *, briefly: bool = False) -> ReadOnlyRecords:
        """Open records at a SQLAlchemy URL. `briefly`: for one look at them, which leaves no files beside SQLite records that no
        server has open.

        Raises StoreError if there are none, the database is unreachable, belongs to another program, or has another schema.
        """
        engine, where = read_only_engine_at(url, _READERS)
        sqlite = engine.dialect.name == "sqlite"
        if sqlite and briefly and not Path(f"{where}-wal").exists():
            engine.dispose()
            engine, where = read_only_engine_at(url, _READERS, immutable=True)
        if sqlite and not Path(where).is_file():
            engine.dispose()
            raise StoreError(f"there are no records at {where}: name the directory of a server that has run")
        try:
            try:
                _check_schema(engine, where)
            except OperationalError:
                if not sqlite:
                    raise
                engine.dispose()
                engine, where = read_only_engine_at(url, _READERS, immutable=True)
                _check_schema(engine, where)
        except SQLAlchemyError as error:
            engine.dispose()
            raise store_error(error, "open", where) from error
        except StoreError:
            engine.dispose()
            raise
        return cls(engine, where)

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
            raise store_error(error, "read", self._where) from error


def open_records(folder: Path, store_url: str | None = None, *, briefly: bool = False) -> ReadOnlyRecords:
    """Open the records of a server's directory, as `ReadOnlyRecords.open`. Raises ConfigError if the folder has none, StoreError."""
    if store_url is not None:
        return ReadOnlyRecords.open(store_url, briefly=briefly)
    file = folder / "records.db"
    if not file.is_file():
        raise ConfigError(_no_records(folder))
    return ReadOnlyRecords.open(f"sqlite:///{file}", briefly=briefly)


def _no_records(folder: Path) -> str:
    if not folder.exists():
        return f"there is no folder {folder}: give the directory of a server, as in --dir offbook-quickstart/server"
    inside = sorted(path.parent for pattern in ("*/records.db", "*/*/records.db") for path in folder.glob(pattern))
    hint = ": it is not the directory of a server, or its server has not started yet"
    if inside:
        hint = f"; there are records in {inside[0]}"
    return f"{folder} has no records.db{hint}"


def _check_schema(engine: Engine, where: str) -> None:
    with engine.connect() as connection:
        if not inspect(connection).has_table("meta"):
            raise StoreError(f"the database at {where} has no records of Offbook: check the path or URL")
        check_schema(connection, where)
