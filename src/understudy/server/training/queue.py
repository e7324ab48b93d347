"""A train request's life: checked, kept as queued, run one at a time, its result stored, its LoRA swapped in."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ...config import TrainConfig
from ...engine.protocol import (
    Event,
    Failed,
    Merged,
    Progressed,
    Ready,
    TrainCommand,
    Trained,
    TrainJob,
    Warned,
    write_job,
)
from ...errors import ServerError, TrainError, UnderstudyError
from ...types import TrainResult
from ...wire import TrainEvent, TrainRequest, TrainStatus
from ..errors import ApiError
from ..models.registry import ModelRegistry
from ..records.store import Store
from ..sampler.client import SamplerClient
from .jobs import build_job, check_ids, job_folder
from .learner_client import LearnerClient

log = logging.getLogger(__name__)

KEPT_JOBS = 10
"""Job folders of failed requests that are kept, newest first."""
QUEUE_METRIC = "sampler/queue_seconds"
"""How long a call waited for its turn in the engine, on average since the last step."""
INTERRUPTED = "The server ended before this request was applied; send it again with the same id"


@dataclass
class Feed:
    """One accepted request and its events so far. Every listener hears all of them; the last is result or error."""

    request: TrainRequest
    events: list[TrainEvent] = field(default_factory=list[TrainEvent])
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1].kind in ("result", "error")

    def publish(self, event: TrainEvent) -> None:
        self.events.append(event)
        self._news.set()
        self._news = asyncio.Event()

    async def listen(self) -> AsyncIterator[TrainEvent]:
        heard = 0
        while True:
            news = self._news
            while heard < len(self.events):
                heard += 1
                yield self.events[heard - 1]
            if self.ended:
                return
            await news.wait()


class Training:
    """The queue of one server. Requests are applied at most once, in the order in which they were accepted."""

    def __init__(
        self,
        store: Store,
        models: ModelRegistry,
        learner: LearnerClient | None,
        jobs: Path,
        sampler: SamplerClient,
        *,
        sleeps: bool = False,
        max_staleness: int | None = None,
    ) -> None:
        """`sleeps`: the sampler leaves the GPU to the learner during a step."""
        self._store = store
        self._models = models
        self._learner = learner
        self._jobs = jobs
        self._sampler = sampler
        self._sleeps = sleeps
        self._max_staleness = max_staleness
        self._feeds: dict[str, Feed] = {}
        self._queue: asyncio.Queue[Feed] = asyncio.Queue()
        self._accepting = asyncio.Lock()
        self._running: Feed | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._ending = False
        self._worker: asyncio.Task[None] | None = None

    @property
    def running(self) -> str | None:
        """The id of the request that is being applied."""
        return self._running.request.id if self._running is not None else None

    # ---- life

    async def open(self) -> None:
        """Settle what an earlier run left, then begin to work."""
        for status in await self._store.unfinished_trains():
            await self._settle(status)
        await asyncio.to_thread(_prune, self._jobs, frozenset[Path]())
        self._worker = asyncio.create_task(self._work(), name="training")

    async def _settle(self, status: TrainStatus) -> None:
        """A request that the last run did not finish: done when its checkpoint is there, else interrupted."""
        request = await self._store.train_request(status.id) or ""
        try:
            checkpoint = self._models.applied(status.model, status.id)
        except ApiError:
            checkpoint = None  # its model is gone, or is served on another base
        result = checkpoint.result() if checkpoint is not None else None
        if result is not None:
            settled = status.model_copy(update={"state": "done", "result": result, "error": None})
            shutil.rmtree(job_folder(self._jobs, status.id), ignore_errors=True)
            log.info("Train request %s of %s had been applied (step %d)", status.id, status.model, result.step)
        else:
            settled = status.model_copy(update={"state": "interrupted", "error": INTERRUPTED})
            log.warning("Train request %s of %s was interrupted and not applied", status.id, status.model)
        await self._store.save_train(settled, request)

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

    async def _interrupt(self, feed: Feed) -> None:
        log.warning("Train request %s was interrupted and not applied", feed.request.id)
        await self._end(
            feed, TrainStatus(id=feed.request.id, model=feed.request.model, state="interrupted", error=INTERRUPTED)
        )
        feed.publish(_error(INTERRUPTED, "interrupted"))

    # ---- requests

    async def status(self, request_id: str) -> TrainStatus:
        """Raises ApiError 404."""
        status = await self._store.train(request_id)
        if status is None:
            raise ApiError(404, f"There is no train request {request_id!r}", "id", "unknown_request")
        return status

    async def submit(self, request: TrainRequest) -> Feed:
        """Accept a request, join it when it is running, or replay its result. Raises ApiError."""
        if self._learner is None:
            raise ApiError(
                409, "This server was started with --inference-only and does not train", code="inference_only"
            )
        self._check_staleness(request.config)
        async with self._accepting:
            feed = self._feeds.get(request.id)
            if feed is not None:
                _same(request, feed.request)
                return feed
            if (result := await self._earlier_result(request)) is not None:
                feed = Feed(request)
                feed.publish(TrainEvent(kind="result", result=result))
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

    async def _earlier_result(self, request: TrainRequest) -> TrainResult | None:
        self._models.model(request.model)
        stored = await self._store.train_request(request.id)
        if stored is not None:
            try:
                _same(request, TrainRequest.model_validate_json(stored))
            except ValidationError:
                log.warning("Train request %s was stored in a shape that is no longer read", request.id)
            status = await self._store.train(request.id)
            if status is not None and status.state == "done":
                return status.result
        checkpoint = self._models.applied(request.model, request.id)
        return checkpoint.result() if checkpoint is not None else None

    def concerns(self, model: str) -> bool:
        """Whether a request for the model waits or runs."""
        return any(feed.request.model == model for feed in self._feeds.values())

    async def _accept(self, request: TrainRequest) -> Feed:
        ids = check_ids(request)
        records, calls = await asyncio.gather(self._store.finished(ids), self._store.calls_of(ids))
        job = await asyncio.to_thread(build_job, request, records, calls)
        await asyncio.to_thread(_write_anew, job_folder(self._jobs, request.id), job)
        await self._store.save_train(
            TrainStatus(id=request.id, model=request.model, state="queued"), request.model_dump_json()
        )
        feed = self._feeds[request.id] = Feed(request)
        self._idle.clear()
        self._queue.put_nowait(feed)
        return feed

    # ---- work

    async def _work(self) -> None:
        while True:
            feed = self._running = await self._queue.get()
            try:
                await self._run(feed)
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

    async def _run(self, feed: Feed) -> None:
        request = feed.request
        model = self._models.model(request.model)
        await self._save(TrainStatus(id=request.id, model=request.model, state="running"), request)
        command = TrainCommand(
            request_id=request.id,
            model=request.model,
            job=job_folder(self._jobs, request.id),
            checkpoints=model.checkpoint_folder,
            step=model.step,
            lora=model.facts.lora,
        )
        assert self._learner is not None, "submit refuses without a learner"
        async with self._sampler.asleep() if self._sleeps else nullcontext():
            event = await self._last_event(self._learner.run(command), feed)
        if isinstance(event, Trained):
            await self._applied(feed, event.result)
        else:
            await self._failed(feed, event)

    async def _last_event(self, running: AsyncGenerator[Event], feed: Feed) -> Trained | Failed:
        async with aclosing(running) as events:
            async for event in events:
                match event:
                    case Progressed():
                        feed.publish(TrainEvent(kind="progress", phase=event.phase, done=event.done, total=event.total))
                    case Warned():
                        feed.publish(TrainEvent(kind="warning", message=event.message))
                    case Trained() | Failed():
                        return event
                    case Ready() | Merged():
                        continue
        raise TrainError("The learner ended its answer without a result")

    async def _failed(self, feed: Feed, event: Failed) -> None:
        """The learner says that it failed, or died: when the checkpoint is there, the step was applied all the same."""
        checkpoint = self._models.applied(feed.request.model, feed.request.id)
        result = checkpoint.result() if checkpoint is not None else None
        if result is not None:
            return await self._applied(feed, result)
        return await self._fail(feed, event.message, event.reason)

    async def _applied(self, feed: Feed, result: TrainResult) -> None:
        request = feed.request
        waited = await self._sampler.queue_seconds()
        if waited is not None:
            result = result.model_copy(update={"metrics": {**result.metrics, QUEUE_METRIC: waited}})
        result = _finite(result)
        if result.applied and result.step > self._models.model(request.model).step:
            problem = await self._models.advance(request.model, result.step)
            if problem is not None:
                warning = f"Step {result.step} is saved, but the sampler has not loaded it yet: {problem}"
                result = result.model_copy(update={"warnings": (*result.warnings, warning)})
        await asyncio.to_thread(shutil.rmtree, job_folder(self._jobs, request.id), True)
        await self._end(feed, TrainStatus(id=request.id, model=request.model, state="done", result=result))
        feed.publish(TrainEvent(kind="result", result=result))

    async def _fail(self, feed: Feed, message: str, reason: str) -> None:
        request = feed.request
        folder = job_folder(self._jobs, request.id)
        message = f"{message}\nThe job is kept at {folder}" if folder.is_dir() else message
        log.error("Train request %s of %s was not applied (%s): %s", request.id, request.model, reason, message)
        await self._end(feed, TrainStatus(id=request.id, model=request.model, state="failed", error=message))
        feed.publish(_error(message, reason))
        waiting = frozenset(job_folder(self._jobs, request_id) for request_id in self._feeds)
        await asyncio.to_thread(_prune, self._jobs, waiting)

    async def _end(self, feed: Feed, status: TrainStatus) -> None:
        """Store the outcome; a store that fails is named in the log, and the listeners still hear the outcome."""
        self._feeds.pop(feed.request.id, None)
        try:
            await self._save(status, feed.request)
        except UnderstudyError as error:
            log.error("The outcome of train request %s could not be stored: %s", status.id, error)

    async def _save(self, status: TrainStatus, request: TrainRequest) -> None:
        await self._store.save_train(status, request.model_dump_json())


def _same(request: TrainRequest, known: TrainRequest) -> None:
    if request != known:
        raise ApiError(
            409,
            f"Train request {request.id!r} was sent before with another body; give a new request a new id",
            "id",
            "id_reused",
        )


def _error(message: str, code: str) -> TrainEvent:
    return TrainEvent(kind="error", message=message, error={"message": message, "code": code, "param": None})


def _finite(result: TrainResult) -> TrainResult:
    """Metrics that are no finite numbers cannot travel as JSON: left out, and named in the warnings."""
    bad = sorted(name for name, value in result.metrics.items() if not math.isfinite(value))
    if not bad:
        return result
    metrics = {name: value for name, value in result.metrics.items() if name not in bad}
    warning = f"These metrics were no finite numbers: {', '.join(bad)}"
    return result.model_copy(update={"metrics": metrics, "warnings": (*result.warnings, warning)})


def _write_anew(folder: Path, job: TrainJob) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    try:
        write_job(folder, job)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _prune(jobs: Path, waiting: frozenset[Path]) -> None:
    """Remove the oldest job folders beyond KEPT_JOBS, never one that waits for its turn."""
    if jobs.is_dir():
        left = [folder for folder in jobs.iterdir() if folder not in waiting]
        folders = sorted(left, key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in folders[KEPT_JOBS:]:
            shutil.rmtree(folder, ignore_errors=True)
