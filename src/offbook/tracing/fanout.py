"""Delivers the events of a run to every sink in its own thread, so that training never waits.

`offbook traces export` delivers again what a sink did not take.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from offbook.base.errors import ServerError
from offbook.base.locked_folders import TemporaryFolder
from offbook.base.redaction import error_text
from offbook.client.connection.download import download_export
from offbook.client.connection.http import Api
from offbook.contracts import CheckpointSaved, EvaluationFinished, GroupsFinished, RejectedError, TraceEvent, TraceSink

from .rollout_reader import read_groups

logger = logging.getLogger("offbook")

QUEUED = 10_000
"""Length of a sink's queue. Further events are only counted."""
CLOSE_SECONDS = 10.0
"""How long the end of a run waits for the sinks."""
REJECTED = "rejected"
"""Kind of the warning about what a server rejects for good."""


class FanOut:
    """The sinks of one run. `servers` have its rollouts."""

    def __init__(self, sinks: Sequence[TraceSink], run: str, servers: Sequence[Api], *, queued: int = QUEUED) -> None:
        reader = SharedReader(servers)
        self.run = run
        self._deliveries = [Delivery(sink, run, reader, queued) for sink in sinks]

    def publish(self, event: TraceEvent) -> None:
        """Queue the event for every sink; returns at once."""
        for delivery in self._deliveries:
            delivery.publish(event)

    def close(self, seconds: float = CLOSE_SECONDS) -> list[str]:
        """Wait for the sinks, at most so many seconds.

        Returns a line per sink with undelivered events, with the command that delivers them, and per sink that recovered.
        """
        deadline = time.monotonic() + seconds
        for delivery in self._deliveries:
            delivery.finish(deadline)
        return [line for delivery in self._deliveries if (line := delivery.missing_line(deadline))]


class SharedReader:
    """Reads rollouts once for all sinks, and keeps the last few in memory."""

    KEPT = 4

    def __init__(self, servers: Sequence[Api]) -> None:
        self.servers = tuple(servers)
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, ...], GroupsFinished | EvaluationFinished] = {}

    def complete(self, event: TraceEvent, runner: asyncio.Runner) -> TraceEvent:
        """The event with its rollouts, read on the runner's event loop, whose connections stay open. Raises ServerError."""
        if not isinstance(event, GroupsFinished | EvaluationFinished) or event.rollouts or not event.groups:
            return event
        with self._lock:
            known = self._kept.get(event.groups)
            if known is None:
                known = replace(event, rollouts=runner.run(read_groups(self.servers, event.groups)))
                self._kept[event.groups] = known
                while len(self._kept) > self.KEPT:
                    self._kept.pop(next(iter(self._kept)))
        return replace(event, rollouts=known.rollouts)


def show_checkpoint(sink: TraceSink, event: CheckpointSaved, servers: Sequence[Api]) -> None:
    """Deliver a checkpoint event with a folder on this machine: the server's own, or a temporary download.

    Call it in a thread without an event loop. Raises ServerError, and the sink's errors.
    """
    if not sink.checkpoint_files or is_here(event.path):
        return show(sink, event)
    with TemporaryFolder("checkpoint") as folder:
        target = folder / f"{event.step:04d}"
        return show(sink, replace(event, path=asyncio.run(_downloaded(servers, event, target))))


def is_here(path: str) -> bool:
    """Whether a checkpoint's folder exists on this machine."""
    return (Path(path) / "adapter_config.json").is_file()


async def _downloaded(servers: Sequence[Api], event: CheckpointSaved, target: Path) -> str:
    for api in servers:
        if event.model in {model.name for model in await api.models()}:
            return str(await download_export(api, event.model, event.step, "peft", target))
    urls = ", ".join(api.url for api in servers)
    raise ServerError(f"{urls} does not know the model {event.model!r}, whose step {event.step} is to be shown")


class Delivery:
    """One sink, its queue and its thread."""

    def __init__(self, sink: TraceSink, run: str, reader: SharedReader, queued: int) -> None:
        self._sink = sink
        self._name = sink_name(sink)
        self._run = run
        self._reader = reader
        self._queue: queue.Queue[TraceEvent | None] = queue.Queue(queued)
        self._undelivered: set[str] = set()  # ids of events
        self._failed: list[TraceEvent] = []
        self._warned: set[str] = set()
        self._over = False  # the run has been told what is missing
        self._unclosed = ""  # why the sink may have kept events that it accepted
        self._deadline: float | None = None
        self._thread: threading.Thread | None = None

    def publish(self, event: TraceEvent) -> None:
        """Queue the event."""
        self._undelivered.add(event.id)
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._warn("queue", f"{self._queue.maxsize} events wait already; further ones are left out")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"offbook-trace-{self._name}", daemon=True)
            self._thread.start()

    def finish(self, deadline: float) -> None:
        """Signal the end of events. Failed events are tried once more until the deadline (monotonic clock)."""
        self._deadline = deadline
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Full:
                return

    def missing_line(self, deadline: float) -> str | None:
        """Wait for the thread until the deadline; returns a line about undelivered events, about a sink that did not close,
        or that a sink which failed has recovered; else None."""
        if self._thread is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        missing, self._over = len(self._undelivered), True
        if self._thread is not None and self._thread.is_alive():
            self._unclosed = "it was still busy when the run ended"
        again = f"`offbook traces export --run {self._run} --to {self._name}`"
        if missing:
            return (
                f"trace sink {self._name!r}: {missing} events of run {self._run} were not delivered: {again} "
                "delivers what is on record"
            )
        if self._unclosed:
            return (
                f"trace sink {self._name!r}: {self._unclosed}; it took all events of run {self._run}, but may lack what it had not "
                f"written yet. {again} delivers them again"
            )
        recovered = self._warned - {REJECTED}
        return f"trace sink {self._name!r}: it works again, all events were delivered" if recovered else None

    def _work(self) -> None:
        with asyncio.Runner() as runner:
            while (event := self._queue.get()) is not None:
                self._deliver(event, runner)
            for event in [*self._failed]:
                if self._deadline is not None and time.monotonic() < self._deadline:
                    self._deliver(event, runner)
        self._close()

    def _close(self) -> None:
        try:
            self._sink.closed()
        except Exception as error:  # noqa: BLE001  # as in `_guard`
            self._unclosed = f"closing failed: {error_text(error)}"
            self._warn(type(error).__name__, self._unclosed)

    def _deliver(self, event: TraceEvent, runner: asyncio.Runner) -> None:
        if self._guard(lambda: self._show(event, runner)):
            self._undelivered.discard(event.id)
        elif event not in self._failed:
            self._failed.append(event)

    def _show(self, event: TraceEvent, runner: asyncio.Runner) -> None:
        if isinstance(event, CheckpointSaved):
            return show_checkpoint(self._sink, event, self._reader.servers)
        return show(self._sink, self._reader.complete(event, runner))

    def _guard(self, deliver: Callable[[], None]) -> bool:
        """Whether the event needs no further delivery: the sink accepted it, or rejected some of it for good."""
        try:
            deliver()
        except RejectedError as error:
            self._warn(REJECTED, f"some of this was rejected for good: {error!s:.500}")
        except Exception as error:  # noqa: BLE001  # a sink is third-party code, and must never stop training
            self._warn(
                type(error).__name__,
                f"failed and goes on without this, which is tried again when the run ends: {error_text(error)}",
            )
            return False
        return True

    def _warn(self, kind: str, what: str) -> None:
        if kind not in self._warned and not self._over:
            self._warned.add(kind)
            logger.warning("trace sink %r: %s", self._name, what)


def show(sink: TraceSink, event: TraceEvent) -> None:
    """Call the sink's method for this kind of event."""
    getattr(sink, event.method)(event)


def sink_name(sink: TraceSink) -> str:
    """The sink's `name`, else its class name."""
    return str(getattr(sink, "name", "") or type(sink).__name__)
