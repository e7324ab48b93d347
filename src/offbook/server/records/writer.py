"""Writes to the database in one thread. All waiting writes are committed in one transaction."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from offbook.base.errors import OffbookError, StoreError

from ..errors import StoreFullError

A = TypeVar("A")
R = TypeVar("R")
Apply: TypeAlias = Callable[[Connection, Sequence[A]], Sequence[R | OffbookError]]
"""Writes a batch of arguments and returns one result per argument. An error as result means that nothing was written."""

_BATCH = 512  # most writes in one transaction
SQLITE_FULL = {13, 778}
"""Error codes: SQLITE_FULL, and SQLITE_IOERR_WRITE, which a quota or a limit on file sizes causes."""


@dataclass(frozen=True, eq=False)
class _Job:
    """`apply=None`: `argument` is work on the engine itself, outside of a transaction."""

    apply: Apply[Any, Any] | None
    argument: Any
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Writer:
    """The writer thread. `file` has the records, and is named in errors."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self._file = file
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="offbook-store", daemon=True)
        self._thread.start()

    async def write(self, apply: Apply[A, R], argument: A) -> R:
        """Queue a write, and return its result after the commit. Waiting writes with the same `apply` form one batch.

        Raises the result if it is an error, and StoreError if the write failed or the writer is closed.
        """
        return await self._queued(apply, argument)

    async def alone(self, work: Callable[[Engine], R]) -> R:
        """Call `work` between two transactions, while writes wait. Raises StoreError if it fails."""
        return await self._queued(None, work)

    async def _queued(self, apply: Apply[Any, Any] | None, argument: Any) -> Any:
        if self._closed:
            raise StoreError(f"the records at {self._file} are closed: the server is shutting down")
        loop = asyncio.get_running_loop()
        job = _Job(apply, argument, loop.create_future(), loop)
        self._queue.put(job)
        return await job.answer

    def close(self) -> None:
        """Complete queued writes, then end the thread. Blocks."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            job = self._queue.get()
            jobs: list[_Job] = []
            while job is not None:
                jobs.append(job)
                if len(jobs) >= _BATCH or self._queue.empty():
                    break
                job = self._queue.get()
            ending = job is None
            for alone, part in groupby(jobs, key=lambda job: job.apply is None):
                for batch in [[job] for job in part] if alone else [list(part)]:
                    self._settle(batch)

    def _settle(self, jobs: list[_Job]) -> None:
        results = self._commit(jobs)
        if len(jobs) > 1 and isinstance(results, StoreError):
            # Write one by one, so that a row that fails does not fail the others.
            for job in jobs:
                self._settle([job])
            return
        answers = [results] * len(jobs) if isinstance(results, StoreError) else results
        for loop, group in groupby(zip(jobs, answers, strict=True), key=lambda pair: pair[0].loop):
            pairs = list(group)
            try:
                loop.call_soon_threadsafe(_answer, pairs)
            except RuntimeError:  # the loop is closed, so nothing waits for the result
                continue

    def _commit(self, jobs: list[_Job]) -> list[Any] | StoreError:
        results: list[Any] = []
        try:
            if jobs[0].apply is None:
                return [jobs[0].argument(self._engine)]
            with self._engine.begin() as connection:
                for apply, group in groupby(jobs, key=lambda job: job.apply):
                    assert apply is not None
                    results.extend(apply(connection, [job.argument for job in group]))
        except SQLAlchemyError as error:
            return store_error(error, "write", self._file)
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001  # the caller gets the error, and the thread goes on
            failure = StoreError(f"could not write records to {self._file}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        return results


def store_error(error: SQLAlchemyError, verb: str, file: Path) -> StoreError:
    """Convert a database error. StoreFullError if the disk is full; `verb` and `file` are for the message."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    if getattr(cause, "sqlite_errorcode", 0) in SQLITE_FULL:
        message = f"no space left to {verb} records at {file} ({cause}): free disk space, or use another --dir"
        result: StoreError = StoreFullError(message)
    else:
        result = StoreError(f"could not {verb} records at {file}: {cause or error}")
    result.__cause__ = error
    return result


def _answer(pairs: list[tuple[_Job, Any]]) -> None:
    for job, answer in pairs:
        if job.answer.done():
            continue  # the caller was cancelled; the write is committed
        if isinstance(answer, OffbookError):
            job.answer.set_exception(answer)
        else:
            job.answer.set_result(answer)
