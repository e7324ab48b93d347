"""A disk cache of answers by the content of their question. SQLite in WAL mode: safe for several processes and a kill."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from offbook.base.errors import StoreError
from offbook.base.redaction import redact

from .provider import Tokens

logger = logging.getLogger("offbook")

SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL, created TEXT NOT NULL)"
BUSY = 30.0
"""Seconds to wait for another process's write."""


@dataclass(frozen=True)
class StoredAnswer:
    """The stored form of a successful answer."""

    text: str
    tokens: Tokens | None
    repairs: int
    served_model: str | None


def question_key(question: Mapping[str, Any]) -> str:
    """SHA-256 of a question as canonical JSON, so that the file contains no prompts."""
    canonical = json.dumps(question, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


class AnswerCache:
    """One file of answers. Create it with `answer_cache(path)`. Raises StoreError for a file that cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asking: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise StoreError(
                f"cache: {path} cannot be written ({error.strerror}): give cache= another file, or None"
            ) from error
        with self._database() as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute(SCHEMA)

    async def get(self, key: str) -> StoredAnswer | None:
        """The stored answer for a question; None if there is none. Raises StoreError."""
        return await asyncio.to_thread(self._get, key)

    async def put(self, key: str, answer: StoredAnswer) -> None:
        """Store an answer, unless it contains a secret. A failure is only logged, since the answer can still be used."""
        if redact(answer.text) != answer.text:
            logger.warning("an answer that contains a key is not stored in the cache")
            return
        try:
            await asyncio.to_thread(self._put, key, answer)
        except StoreError as error:
            logger.warning("an answer was not stored in the cache: %s", error)

    def asking(self, key: str) -> asyncio.Lock:
        """The lock of a question in this event loop. A caller that waited should look into the cache first."""
        return self._asking.setdefault((id(asyncio.get_running_loop()), key), asyncio.Lock())

    def _get(self, key: str) -> StoredAnswer | None:
        with self._database() as database:
            row = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        try:
            return _read(key, row[0])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.warning(
                "cache: %s: a damaged answer was skipped, and its question is sent again: %r", self._path, error
            )
            return None

    def _put(self, key: str, answer: StoredAnswer) -> None:
        kept = asdict(answer)
        row = (key, json.dumps(kept | {"digest": _digest(key, kept)}))
        with self._database() as database:
            database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, datetime('now'))", row)

    @contextmanager
    def _database(self) -> Generator[sqlite3.Connection]:
        """A connection for one transaction, which makes the cache usable from any thread and after a fork."""
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY)) as database, database:
                database.text_factory = _replaced
                yield database
        except sqlite3.Error as error:
            damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            advice = "The file is damaged or no cache: delete it, or give" if damaged else "Look at the disk, or give"
            raise StoreError(f"cache: {self._path}: {error}. {advice} cache= another, or None") from error


def _replaced(text: bytes) -> str:
    """Bytes that are no UTF-8 become U+FFFD: the digest tells, where SQLite would end the run."""
    return text.decode(errors="replace")


def _read(key: str, row: str) -> StoredAnswer:
    """A stored answer. Raises ValueError and others for a damaged one; rows of earlier versions have no digest."""
    kept: dict[str, Any] = json.loads(row)
    digest = kept.pop("digest", None)
    if digest is not None and digest != _digest(key, kept):
        raise ValueError("its digest differs")
    tokens = None if kept["tokens"] is None else Tokens(*map(int, kept["tokens"]))
    if not isinstance(kept["text"], str):
        raise TypeError("its text is none")
    return StoredAnswer(kept["text"], tokens, int(kept["repairs"]), kept["served_model"])


def _digest(key: str, kept: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{key} {json.dumps(kept, sort_keys=True)}".encode()).hexdigest()


@cache
def answer_cache(path: Path) -> AnswerCache:
    """The cache of a file, one object per process, so that equal questions share their locks."""
    return AnswerCache(path.expanduser().absolute())
