"""The queue of train requests: applied one at a time, in the order of their arrival."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from offbook.base.errors import OffbookError, ServerError, TrainError
from offbook.base.redaction import error_text
from offbook.base.wire import TrainRequest, TrainStatus

from ...engine.protocol import Failed
from ..errors import ApiError
from .history import INTERRUPTED, TrainHistory, check_same
from .jobs import JobFolders
from .runner import TrainFeed, TrainRunner

logger = logging.getLogger(__name__)

STORE_AGAIN_SECONDS = 5.0
"""Interval of the attempts to store an outcome after the database failed."""


class TrainQueue:
    """The queue of one server. A request is applied at most once, however often it is sent."""

    def __init__(
        self,
        history: TrainHistory,
        jobs: JobFolders,
        runner: TrainRunner | None,
    ) -> None:
        """`runner`: None rejects every request (--inference-only)."""
        self._history = history
        self._jobs = jobs
        self._runner = runner
        self._feeds: dict[str, TrainFeed] = {}
        self._queue: asyncio.Queue[TrainFeed] = asyncio.Queue()
        self._accepting = asyncio.Lock()
        self._running: TrainFeed | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._worker: asyncio.Task[None] | None = None
        self._unstored: dict[str, asyncio.Task[None]] = {}
        self._last_attempt = asyncio.Event()  # set by `drain`: outcomes are stored now or never

    @property
    def running(self) -> str | None:
        """The id of the request that is being applied, or None."""
        return self._running.request.id if self._running is not None else None

    def concerns(self, model: str) -> bool:
        """Whether a request for the model waits in the queue or is being applied."""
        return any(feed.request.model == model for feed in self._feeds.values())

    async def open(self) -> None:
        """Store outcomes for the requests that an earlier process left unfinished, then start the worker.

        Raises StoreError.
        """
        await self._history.settle()
        await asyncio.to_thread(self._jobs.prune)
        if self._runner is not None:
            self._worker = asyncio.create_task(self._work(self._runner), name="training")

    async def drain(self, deadline: float) -> None:
        """Stop: reject new requests, interrupt waiting ones, and give the running one `deadline` seconds to finish."""
        async with self._accepting:
            self._draining = True
            while not self._queue.empty():
                await self._interrupt(self._queue.get_nowait())
            if self._running is None:
                self._idle.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), deadline)
        running = self._running
        if self._worker is not None:
            self._worker.cancel()
            with suppress(asyncio.CancelledError):
                await self._worker
        if running is not None and not running.ended:
            await self._interrupt(running)
        self._last_attempt.set()
        await asyncio.gather(*self._unstored.values())

    async def submit(self, request: TrainRequest) -> TrainFeed:
        """Accept a request and return its feed.

        A request with a known id joins the waiting or running one, or gets the stored result. Raises ApiError if the
        request is invalid, another request has its id, or the server does not train or is shutting down.
        """
        if self._runner is None:
            raise ApiError(
                409, "This server was started with --inference-only and does not train", code="inference_only"
            )
        async with self._accepting:
            feed = self._feeds.get(request.id)
            if feed is not None:
                check_same(request, feed.request)
                return feed
            if (result := await self._history.result(request)) is not None:
                feed = TrainFeed(request)
                feed.end(result)
                return feed
            if self._draining:
                raise ApiError(503, "The server is shutting down and accepts no train requests", code="ending")
            return await self._accept(request)

    async def _accept(self, request: TrainRequest) -> TrainFeed:
        if (outdated := self._unstored.pop(request.id, None)) is not None:
            outdated.cancel()  # the new state replaces the outcome that could not be stored
        await self._jobs.prepare(request)
        await self._history.save(request, TrainStatus(id=request.id, model=request.model, state="queued"))
        feed = self._feeds[request.id] = TrainFeed(request)
        self._idle.clear()
        self._queue.put_nowait(feed)
        return feed

    async def _work(self, runner: TrainRunner) -> None:
        while True:
            feed = self._running = await self._queue.get()
            try:
                await self._run(runner, feed)
            except Exception as error:  # the boundary of the worker: it must go on to the next request
                if not isinstance(error, OffbookError):
                    logger.exception("Train request %s failed", feed.request.id)
                reason = error.reason if isinstance(error, TrainError) else "failed"
                reason = error.code if isinstance(error, ServerError) else reason
                await self._fail(feed, f"{error}" if isinstance(error, OffbookError) else error_text(error), reason)
            finally:
                self._running = None
                if self._queue.empty():
                    self._idle.set()

    async def _run(self, runner: TrainRunner, feed: TrainFeed) -> None:
        request = feed.request
        await self._history.save(request, TrainStatus(id=request.id, model=request.model, state="running"))
        outcome = await runner.run(feed)
        if isinstance(outcome, Failed):
            await self._fail(feed, outcome.message, outcome.reason)
        else:
            await self._close(feed, TrainStatus(id=request.id, model=request.model, state="done", result=outcome))
            feed.end(outcome)

    async def _fail(self, feed: TrainFeed, message: str, reason: str) -> None:
        request = feed.request
        folder = self._jobs.folder(request.id)
        message = f"{message}\nIts job is kept in {folder}" if folder.is_dir() else message
        logger.error("Train request %s of %s was not applied (%s): %s", request.id, request.model, reason, message)
        await self._close(feed, TrainStatus(id=request.id, model=request.model, state="failed", error=message))
        feed.fail(message, reason)
        await asyncio.to_thread(self._jobs.prune, tuple(self._feeds))

    async def _interrupt(self, feed: TrainFeed) -> None:
        request = feed.request
        logger.warning("Train request %s was interrupted and not applied", request.id)
        status = TrainStatus(id=request.id, model=request.model, state="interrupted", error=INTERRUPTED)
        await self._close(feed, status)
        feed.fail(INTERRUPTED, "interrupted")

    async def _close(self, feed: TrainFeed, status: TrainStatus) -> None:
        """Store the outcome.

        If the database fails, log it and try again later; listeners get the outcome all the same.
        """
        self._feeds.pop(feed.request.id, None)
        try:
            await self._history.save(feed.request, status)
        except OffbookError as error:
            logger.error("The outcome of train request %s could not be stored; retrying: %s", status.id, error)
            task = asyncio.create_task(self._store_later(feed.request, status), name=f"outcome {status.id}")
            self._unstored[status.id] = task

    async def _store_later(self, request: TrainRequest, status: TrainStatus) -> None:
        """Retry until the outcome is stored, with a last attempt at shutdown; after that, the next start finds an
        outcome.

        Cancelled if the request is sent again, which makes this outcome obsolete.
        """
        while not self._last_attempt.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._last_attempt.wait(), STORE_AGAIN_SECONDS)
            try:
                await self._history.save(request, status)
            except OffbookError as error:
                logger.warning("The outcome of train request %s is not stored yet: %s", status.id, error)
                continue
            logger.info("The outcome of train request %s is stored", status.id)
            self._unstored.pop(status.id, None)
            return
