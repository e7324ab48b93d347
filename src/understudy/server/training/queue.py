"""Train requests in the order in which they were accepted, one at a time."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from ...config import TrainConfig
from ...engine.protocol import Failed
from ...errors import ServerError, TrainError, UnderstudyError
from ...types import TrainResult
from ...wire import TrainRequest, TrainStatus
from ..errors import ApiError
from .feed import TrainFeed
from .history import INTERRUPTED, TrainHistory, check_same
from .job_folders import JobFolders
from .runner import TrainRunner

log = logging.getLogger(__name__)

STORE_AGAIN_SECONDS = 5.0


class TrainQueue:
    """The queue of one server. Each request is applied at most once."""

    def __init__(
        self,
        history: TrainHistory,
        jobs: JobFolders,
        runner: TrainRunner | None,
        *,
        max_staleness: int | None = None,
    ) -> None:
        """Without a runner every request is refused. `max_staleness`: the largest that a request may ask for."""
        self._history = history
        self._jobs = jobs
        self._runner = runner
        self._max_staleness = max_staleness
        self._feeds: dict[str, TrainFeed] = {}
        self._queue: asyncio.Queue[TrainFeed] = asyncio.Queue()
        self._accepting = asyncio.Lock()
        self._running: TrainFeed | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending = False
        self._worker: asyncio.Task[None] | None = None
        self._unstored: dict[str, asyncio.Task[None]] = {}
        self._last_try = asyncio.Event()  # set while the server ends

    @property
    def running(self) -> str | None:
        """The id of the request that is being applied."""
        return self._running.request.id if self._running is not None else None

    def concerns(self, model: str) -> bool:
        """Whether a request for the model waits or runs."""
        return any(feed.request.model == model for feed in self._feeds.values())

    # ---- life

    async def open(self) -> None:
        """Settle what an earlier run left, then begin to work."""
        await self._history.settle()
        await asyncio.to_thread(self._jobs.prune)
        if self._runner is not None:
            self._worker = asyncio.create_task(self._work(self._runner), name="training")

    async def drain(self, deadline: float) -> None:
        """Take no more, let the running step end within `deadline` seconds, mark the rest as interrupted."""
        async with self._accepting:
            self._ending = True
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
        self._last_try.set()
        await asyncio.gather(*self._unstored.values())

    # ---- accepting

    async def submit(self, request: TrainRequest) -> TrainFeed:
        """Accept a request, join it when it is running, or replay its result. Raises ApiError."""
        if self._runner is None:
            raise ApiError(
                409, "This server was started with --inference-only and does not train", code="inference_only"
            )
        self._check_staleness(request.config)
        async with self._accepting:
            feed = self._feeds.get(request.id)
            if feed is not None:
                check_same(request, feed.request)
                return feed
            if (result := await self._history.result(request)) is not None:
                feed = TrainFeed(request)
                feed.end(result)
                return feed
            if self._ending:
                raise ApiError(503, "The server is ending and takes no more train requests", code="ending")
            return await self._accept(request)

    def _check_staleness(self, config: TrainConfig) -> None:
        limit = self._max_staleness
        if config.overlap and limit is not None and config.max_staleness > limit:
            raise ApiError(
                400,
                f"max_staleness {config.max_staleness} needs {config.max_staleness + 2} adapters in vLLM at once, and this "
                f"server has --max-loras {limit + 2}: start it with more, or lower max_staleness",
                "config.max_staleness",
                "invalid_value",
            )

    async def _accept(self, request: TrainRequest) -> TrainFeed:
        if (outdated := self._unstored.pop(request.id, None)) is not None:
            outdated.cancel()  # what is told from now on counts
        await self._jobs.prepare(request)
        await self._history.save(request, TrainStatus(id=request.id, model=request.model, state="queued"))
        feed = self._feeds[request.id] = TrainFeed(request)
        self._idle.clear()
        self._queue.put_nowait(feed)
        return feed

    # ---- work

    async def _work(self, runner: TrainRunner) -> None:
        while True:
            feed = self._running = await self._queue.get()
            try:
                await self._run(runner, feed)
            except Exception as error:  # the boundary of the worker: the next request must be served
                if not isinstance(error, UnderstudyError):
                    log.exception("Train request %s failed", feed.request.id)
                reason = error.reason if isinstance(error, TrainError) else "failed"
                reason = error.code if isinstance(error, ServerError) else reason
                await self._fail(feed, f"{error}" if isinstance(error, UnderstudyError) else repr(error), reason)
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
            await self._done(feed, outcome)

    # ---- outcomes

    async def _done(self, feed: TrainFeed, result: TrainResult) -> None:
        request = feed.request
        await self._close(feed, TrainStatus(id=request.id, model=request.model, state="done", result=result))
        feed.end(result)

    async def _fail(self, feed: TrainFeed, message: str, reason: str) -> None:
        request = feed.request
        folder = self._jobs.folder(request.id)
        message = f"{message}\nThe job is kept at {folder}" if folder.is_dir() else message
        log.error("Train request %s of %s was not applied (%s): %s", request.id, request.model, reason, message)
        await self._close(feed, TrainStatus(id=request.id, model=request.model, state="failed", error=message))
        feed.fail(message, reason)
        await asyncio.to_thread(self._jobs.prune, tuple(self._feeds))

    async def _interrupt(self, feed: TrainFeed) -> None:
        request = feed.request
        log.warning("Train request %s was interrupted and not applied", request.id)
        status = TrainStatus(id=request.id, model=request.model, state="interrupted", error=INTERRUPTED)
        await self._close(feed, status)
        feed.fail(INTERRUPTED, "interrupted")

    async def _close(self, feed: TrainFeed, status: TrainStatus) -> None:
        """Store the outcome; a store that fails is named in the log and tried again until it takes it, and the listeners
        still hear the outcome."""
        self._feeds.pop(feed.request.id, None)
        try:
            await self._history.save(feed.request, status)
        except UnderstudyError as error:
            log.error("The outcome of train request %s could not be stored, and is tried again: %s", status.id, error)
            task = asyncio.create_task(self._store_later(feed.request, status), name=f"outcome {status.id}")
            self._unstored[status.id] = task

    async def _store_later(self, request: TrainRequest, status: TrainStatus) -> None:
        """Until it is stored, or the server ends: then once more, and else the next start settles the request. Cancelled
        when the request is sent again: then its newer state counts."""
        while not self._last_try.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._last_try.wait(), STORE_AGAIN_SECONDS)
            try:
                await self._history.save(request, status)
            except UnderstudyError as error:
                log.warning("The outcome of train request %s is not stored yet: %s", status.id, error)
                continue
            log.info("The outcome of train request %s is stored", status.id)
            self._unstored.pop(status.id, None)
            return
