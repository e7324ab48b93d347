"""Delivery notes: a small file per run and sink with the events that the sink has not accepted yet."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from offbook.base.temporary_folders import locked
from offbook.contracts import EVENT_KINDS, EvaluationFinished, GroupsFinished, TraceEvent, digest

logger = logging.getLogger("offbook")

KINDS: dict[str, TypeAdapter[TraceEvent]] = {kind.__name__: TypeAdapter(kind) for kind in EVENT_KINDS}
SUFFIX = ".notes.jsonl"
LOCK_SECONDS = 1.0
"""How long a change of the notes waits for another process; then it is made without the lock, since a run must not wait."""


@dataclass(frozen=True)
class Undelivered:
    """An undelivered event without its rollouts, and the URLs of the servers that have them."""

    event: TraceEvent
    servers: tuple[str, ...]


class DeliveryNotes:
    """The notes of one run and sink: a line when an event is due, and one when it was delivered.

    The file is deleted when all events were delivered. Several processes may share it: a run, the next run that delivers what
    the run left, and an export.
    """

    def __init__(self, folder: Path, run: str, sink: str) -> None:
        self.run, self.sink = run, sink
        self._file = folder / f"{quote(run, safe='')[:60]}-{digest(run)}{_ending(sink)}"
        self._open: dict[str, Undelivered] = {}
        self._lock = threading.Lock()
        self._broken = False
        for note in _read(self._file):
            self._open[note.event.id] = note

    @classmethod
    def of_sink(cls, folder: Path, sink: str) -> list[DeliveryNotes]:
        """The notes of all runs for this sink."""
        first = [next(_read(file), None) for file in sorted(folder.glob("*" + _ending(sink)))]
        return [cls(folder, note.event.run, sink) for note in first if note is not None]

    @property
    def undelivered(self) -> list[Undelivered]:
        """The events that nobody has delivered, in the order in which they became due."""
        with self._alone():
            if not self._broken and self._file.exists():
                others = {note.event.id for note in _read(self._file)}
                self._open = {id: note for id, note in self._open.items() if id in others}
                self._delete_if_done()
            return list(self._open.values())

    def due(self, event: TraceEvent, servers: tuple[str, ...]) -> None:
        """Note an event before it is delivered."""
        bare = replace(event, rollouts=()) if isinstance(event, GroupsFinished | EvaluationFinished) else event
        kind = type(bare).__name__
        value = KINDS[kind].dump_python(bare, mode="json")
        with self._alone():
            self._open[event.id] = Undelivered(bare, servers)
            self._append({"due": kind, "event": value, "servers": list(servers)})

    def taken(self, event: TraceEvent) -> None:
        """Note that the event was delivered."""
        with self._alone():
            self._open.pop(event.id, None)
            if self._file.exists():  # else another process has delivered the rest
                self._append({"taken": event.id})
                self._delete_if_done()

    def _delete_if_done(self) -> None:
        if not self._open and next(_read(self._file), None) is None:
            self._file.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Hold the notes: no other thread or process changes them meanwhile."""
        with self._lock:
            lock = _folder_lock(self._file.parent)
            try:
                yield
            finally:
                if lock is not None:
                    os.close(lock)

    def _append(self, line: dict[str, object]) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # the notes are optional: a full disk must not stop a run
            if not self._broken:
                self._broken = True
                logger.warning("delivery notes of trace sinks cannot be written to %s: %s", self._file, error)


def _folder_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where it cannot be had."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return locked(folder)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.001)
        except OSError:  # no folder yet, or no locks there
            return None


def _ending(sink: str) -> str:
    """The ending of a sink's file names. It has a digest, since a sink's name may contain a long path or URL."""
    return f".{digest(sink)}{SUFFIX}"


def _read(file: Path) -> Iterator[Undelivered]:
    """The events that are due and not delivered. Incomplete or invalid lines are skipped with a warning."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    waiting: dict[str, Undelivered] = {}
    for line in filter(None, lines):
        try:
            values = json.loads(line)
            if "taken" in values:
                waiting.pop(values["taken"], None)
                continue
            event = KINDS[values["due"]].validate_python(values["event"])
            waiting[event.id] = Undelivered(event, tuple(values["servers"]))
        except (ValueError, KeyError, TypeError, ValidationError, RecursionError):
            logger.warning("%s: a line is not a delivery note and was skipped: %.200r", file, line)
    yield from waiting.values()
