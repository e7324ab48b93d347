"""Checks the file of SQLite records before it is opened, so that no foreign, damaged or lost records are overwritten."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Engine

from offbook.base.errors import StoreError

from .tables import SCHEMA

APPLICATION_ID = 0x4F464642  # "OFFB"
CHECKED_BYTES = 2**30
"""Larger files are not checked at start, which would read the whole file; `offbook verify` checks them."""
_MAGIC = b"SQLite format 3\0"


def check_file(path: Path) -> None:
    """Raise StoreError if the file must not be opened: it is foreign, damaged, or empty although checkpoints exist."""
    problem = fault_of(path, "quick_check" if path.exists() and path.stat().st_size <= CHECKED_BYTES else None)
    if problem is not None:
        raise StoreError(
            f"the records at {path} cannot be used: {problem}. Restore them from a backup, or run `offbook verify "
            f"--dir {path.parent} --repair` to move them aside, so that the server starts new ones"
        )


def fault_of(path: Path, check: str | None) -> str | None:
    """What is wrong with a file of records; None if nothing is, or there is no file.

    `check` is SQLite's quick_check or integrity_check; with None the contents are not checked.
    """
    if not path.exists():
        return None
    try:
        # A file with a journal is incomplete after a power loss; SQLite repairs it when it opens the file.
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
        if not head:
            return "the file is empty, but there are checkpoints" if _has_checkpoints(path.parent) else None
        if head != _MAGIC and not path.with_name(f"{path.name}-journal").exists():
            return "it is not a SQLite database"
        with closing(sqlite3.connect(path, timeout=10.0)) as connection:
            return _foreign(connection) or (_damaged(connection, check) if check else None)
    except (OSError, sqlite3.Error) as error:
        return str(error)


def mark_file(engine: Engine) -> None:
    """Write Offbook's application_id and the schema into the file's header."""
    with engine.begin() as connection:
        if connection.exec_driver_sql("PRAGMA application_id").scalar() != APPLICATION_ID:
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        if connection.exec_driver_sql("PRAGMA user_version").scalar() != SCHEMA:
            connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA}")


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
    return None if lines == ["ok"] else "it is damaged: " + "; ".join(lines)


def _has_checkpoints(folder: Path) -> bool:
    return next(folder.glob("*/models/*/checkpoints/*/offbook.json"), None) is not None
