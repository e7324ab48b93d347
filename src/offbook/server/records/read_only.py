"""Opens records for reading only, whether or not a server uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from offbook.base.errors import StoreError

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
    def open(cls, url: str) -> ReadOnlyRecords:
        """Open records at a SQLAlchemy URL.

        Raises StoreError if there are none, the database is unreachable, belongs to another program, or has another schema.
        """
        engine, where = read_only_engine_at(url, _READERS)
        sqlite = engine.dialect.name == "sqlite"
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


def _check_schema(engine: Engine, where: str) -> None:
    with engine.connect() as connection:
        if not inspect(connection).has_table("meta"):
            raise StoreError(f"the database at {where} has no records of Offbook: check the path or URL")
        check_schema(connection, where)
