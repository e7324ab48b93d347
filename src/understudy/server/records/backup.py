"""A copy of the records beside them, made before a migration."""

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

log = logging.getLogger(__name__)


def back_up(engine: Engine, where: str, schema: int) -> Path | None:
    """Copy a SQLite database to `<file>.schema-<N>.bak`, over an older copy of that name; other databases are not copied
    (None). Raises StoreError, StoreFullError: the records are as they were, and there is no half copy."""
    if engine.dialect.name != "sqlite":
        log.warning("Records at %s are migrated without a copy: %s has backups of its own", where, engine.dialect.name)
        return None
    raw = engine.raw_connection()
    try:
        source = raw.driver_connection
        assert isinstance(source, sqlite3.Connection), "the SQLite dialect of the standard library"
        (_, _, name), *_ = source.execute("PRAGMA database_list").fetchall()
        file, copy = Path(name), Path(f"{name}.schema-{schema}.bak")
        log.info("Copying records (%d MiB) to %s before they are migrated", file.stat().st_size >> 20, copy)
        _copy(source, file, copy)
    except (sqlite3.Error, OSError) as error:
        full = getattr(error, "sqlite_errorcode", 0) in SQLITE_FULL or getattr(error, "errno", 0) == errno.ENOSPC
        message = f"could not copy the records at {where} before migrating them ({error}); nothing was changed"
        if full:
            raise StoreFullError(
                f"{message}: free space for a copy beside them, or move them to a larger disk"
            ) from error
        raise StoreError(message) from error
    finally:
        raw.close()
    return copy


def _copy(source: sqlite3.Connection, file: Path, copy: Path) -> None:
    """What is committed, that in the write-ahead log included: written beside, synced, then renamed into place."""
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
