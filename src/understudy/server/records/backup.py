"""Copies a SQLite database before a migration changes it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine

from ...engine.checkpoint_files import sync
from ...errors import StoreError
from ..errors import StoreFullError
from .writer import SQLITE_FULL

logger = logging.getLogger(__name__)


def back_up(engine: Engine, where: str, schema: int) -> Path | None:
    """Copy a SQLite database to `<file>.schema-<N>.bak` and return that path.

    An older copy of that name is replaced. For another database, logs a warning and returns None. Raises StoreError if the
    copy fails, StoreFullError if the disk is full; the records are then unchanged, and no incomplete copy is left.
    """
    if engine.dialect.name != "sqlite":
        logger.warning("Migrating records at %s without a copy: use the backups of %s", where, engine.dialect.name)
        return None
    raw = engine.raw_connection()
    try:
        source = raw.driver_connection
        assert isinstance(source, sqlite3.Connection), "the SQLite dialect of the standard library"
        (_, _, name), *_ = source.execute("PRAGMA database_list").fetchall()
        file, copy = Path(name), Path(f"{name}.schema-{schema}.bak")
        logger.info("Copying records (%d MiB) to %s before their migration", file.stat().st_size >> 20, copy)
        _copy(source, file, copy)
    except (sqlite3.Error, OSError) as error:
        full = getattr(error, "sqlite_errorcode", 0) in SQLITE_FULL or getattr(error, "errno", 0) == errno.ENOSPC
        message = f"could not copy the records at {where} before migrating them ({error}); the records are unchanged"
        if full:
            raise StoreFullError(
                f"{message}: free space for a copy in the same directory, or move the records to a larger disk"
            ) from error
        raise StoreError(message) from error
    finally:
        raw.close()
    return copy


def _copy(source: sqlite3.Connection, file: Path, copy: Path) -> None:
    """Copy all committed rows, including those in the write-ahead log. Write `<copy>.part`, sync it, and rename it."""
    part = Path(f"{copy}.part")
    _remove(part)
    part.touch(0o600)
    try:
        with closing(sqlite3.connect(part)) as target:
            source.backup(target)
        shutil.copymode(file, part)
        sync(part)
        os.replace(part, copy)
        sync(copy.parent)
    finally:
        _remove(part)


def _remove(part: Path) -> None:
    for path in (part, Path(f"{part}-journal"), Path(f"{part}-wal"), Path(f"{part}-shm")):
        path.unlink(missing_ok=True)
