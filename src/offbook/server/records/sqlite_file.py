"""Checks the file of SQLite records before it is opened, so that no foreign, damaged or lost records are overwritten."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

from offbook.base.errors import StoreError

from ...engine.checkpoint_files import is_file, not_checked

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
