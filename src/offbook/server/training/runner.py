"""Applies one train request: the learner computes the step, then the sampler loads it. Its events go to any number of listeners."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field

from offbook.base.errors import TrainError
from offbook.base.types import TrainResult
from offbook.base.wire import TrainEvent, TrainRequest
from offbook.server.models.checkpoint_swaps import ModelServices

from ...engine.protocol import CompletionScored, Event, Failed, Merged, Progressed, Ready, TrainCommand, Trained, Warned
from ..wing import ServerWing, tell_of_new_step
from .history import TrainHistory
from .jobs import JobFolders
from .learner_client import LearnerClient


@dataclass
class TrainFeed:
    """An accepted train request and its events so far.

    Every listener gets all of them; the last is a result or an error.
    """

    request: TrainRequest
    events: list[TrainEvent] = field(default_factory=list[TrainEvent])
    _new_event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        """Whether the last event, a result or an error, was published."""
        return bool(self.events) and self.events[-1].kind in ("result", "error")

    def publish(self, event: TrainEvent) -> None:
        """Append an event and wake the listeners."""
        self.events.append(event)
        self._new_event.set()
        self._new_event = asyncio.Event()

    def end(self, result: TrainResult) -> None:
        """Publish the result as the last event."""
        self.publish(TrainEvent(kind="result", result=result))

    def fail(self, message: str, code: str) -> None:
        """Publish an error as the last event."""
        error = {"message": message, "code": code, "param": None}
        self.publish(TrainEvent(kind="error", message=message, error=error))

    async def listen(self) -> AsyncIterator[TrainEvent]:
        """Yield all events from the first one on, and wait for new ones until the last."""
        count = 0
        while True:
            new_event = self._new_event
            while count < len(self.events):
                count += 1
                yield self.events[count - 1]
            if self.ended:
                return
            await new_event.wait()


WRONG_METRIC = "sampler/wrong_answers"
"""Answers of the sampler since the last step that contradicted their requests."""
SWAP_METRIC = "sampler/swap_seconds"
"""Time to load the new step in the sampler and to route calls to it, in seconds."""


class TrainRunner:
    """Applies train requests, one at a time.

    `free_gpu()`: a context manager inside which the sampler leaves the learner the memory of a shared GPU.
    `wrong_answers()`: number of wrong answers of the sampler so far. `keep_tokens`: see TrainCommand.
    `wings`: see ServerWing.
    """

    def __init__(
        self,
        learner: LearnerClient,
        models: ModelServices,
        history: TrainHistory,
        jobs: JobFolders,
        *,
        free_gpu: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        wrong_answers: Callable[[], int] = lambda: 0,
        keep_tokens: int = 0,
        wings: Mapping[str, ServerWing] = {},  # filled later by the caller, else empty
    ) -> None:
        self._learner = learner
        self._models = models
        self._history = history
        self._jobs = jobs
        self._free_gpu = free_gpu
        self._wrong_answers = wrong_answers
        self._wrong_before = 0
        self._keep_tokens = keep_tokens
        self._wings = wings

    async def run(self, feed: TrainFeed) -> TrainResult | Failed:
        """Apply a request whose job is prepared. Publishes the learner's progress to the feed.

        A step counts as applied once its checkpoint is saved, even if the learner fails afterwards. Raises ApiError
        for an unknown model, TrainError, and EngineError for a damaged checkpoint.
        """
        request = feed.request
        model = self._models.registry.model(request.model)
        command = TrainCommand(
            request_id=request.id,
            model=request.model,
            job=self._jobs.folder(request.id),
            checkpoints=model.checkpoint_folder,
            step=model.step,
            lora=model.facts.lora,
            keep_tokens=self._keep_tokens,
            teacher=self._models.registry.teacher(request.config),
        )
        async with self._free_gpu():
            event = await _last_event(self._learner.run(command), feed)
        if isinstance(event, Trained):
            return await self._take_into_use(request, event.result)
        saved = self._history.checkpointed(request.model, request.id)
        return event if saved is None else await self._take_into_use(request, saved)

    async def _take_into_use(self, request: TrainRequest, result: TrainResult) -> TrainResult:
        """Add the server's metrics to the result, load its checkpoint in the sampler, and delete the job."""
        wrong = self._wrong_answers()
        metrics: dict[str, float] = {WRONG_METRIC: wrong - self._wrong_before}
        self._wrong_before = wrong
        result = _finite(result.model_copy(update={"metrics": result.metrics | metrics}))
        if result.applied and result.step > self._models.registry.model(request.model).step:
            began = time.monotonic()
            problem = await self._models.swaps.advance(request.model, result.step)
            result = result.model_copy(update={"metrics": {**result.metrics, SWAP_METRIC: time.monotonic() - began}})
            if problem is not None:
                warning = f"Step {result.step} is saved, but the sampler has not loaded it yet: {problem}"
                result = result.model_copy(update={"warnings": (*result.warnings, warning)})
            tell_of_new_step(self._wings)
        await asyncio.to_thread(self._jobs.remove, request.id)
        return result


async def _last_event(stream: AsyncGenerator[Event], feed: TrainFeed) -> Trained | Failed:
    """Publish the events of a train command until its last one. Raises TrainError if there is none."""
    async with aclosing(stream) as events:
        async for event in events:
            match event:
                case Progressed():
                    feed.publish(TrainEvent(kind="progress", phase=event.phase, done=event.done, total=event.total))
                case Warned():
                    feed.publish(TrainEvent(kind="warning", message=event.message))
                case Trained() | Failed():
                    return event
                case Ready() | Merged() | CompletionScored():
                    continue
    raise TrainError("The learner ended without a result; its log says why")


def _finite(result: TrainResult) -> TrainResult:
    """Remove metrics that are not finite, since JSON cannot carry them; a warning names them."""
    bad = sorted(name for name, value in result.metrics.items() if not math.isfinite(value))
    if not bad:
        return result
    metrics = {name: value for name, value in result.metrics.items() if name not in bad}
    warning = f"These metrics are not finite and were removed: {', '.join(bad)}"
    return result.model_copy(update={"metrics": metrics, "warnings": (*result.warnings, warning)})
