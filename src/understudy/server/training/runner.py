"""One train request with the learner: its step is made, then taken into use."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext

from ...engine.protocol import Event, Failed, Merged, Progressed, Ready, TrainCommand, Trained, Warned
from ...errors import TrainError
from ...types import TrainResult
from ...wire import TrainEvent, TrainRequest
from ..models.model_services import ModelServices
from ..sampler.sampler import SamplerCalls
from .feed import TrainFeed
from .history import TrainHistory
from .job_folders import JobFolders
from .learner_client import LearnerClient

QUEUE_METRIC = "sampler/queue_seconds"
"""How long a call waited for its turn in the engine, on average since the last step."""
WRONG_METRIC = "sampler/wrong_answers"
"""Answers of the sampler since the last step that did not fit their request."""


SWAP_METRIC = "sampler/swap_seconds"
"""How long the sampler took to load the new step and to flip to it."""


class TrainRunner:
    """`sleeps`: the sampler leaves the GPU to the learner during a step. `wrong_answers`: how many there were so far.
    `keep_tokens`: see TrainCommand."""

    def __init__(
        self,
        learner: LearnerClient,
        models: ModelServices,
        calls: SamplerCalls,
        history: TrainHistory,
        jobs: JobFolders,
        *,
        sleeps: bool = False,
        wrong_answers: Callable[[], int] = lambda: 0,
        keep_tokens: int = 0,
    ) -> None:
        self._learner = learner
        self._models = models
        self._calls = calls
        self._history = history
        self._jobs = jobs
        self._sleeps = sleeps
        self._wrong_answers = wrong_answers
        self._wrong_before = 0
        self._keep_tokens = keep_tokens

    async def run(self, feed: TrainFeed) -> TrainResult | Failed:
        """Run a prepared job. A learner that fails once its checkpoint is saved has applied the step all the same.
        Raises ApiError, TrainError, EngineError."""
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
        )
        async with self._calls.asleep() if self._sleeps else nullcontext():
            event = await _last_event(self._learner.run(command), feed)
        if isinstance(event, Trained):
            return await self._take_into_use(request, event.result)
        saved = self._history.checkpointed(request.model, request.id)
        return event if saved is None else await self._take_into_use(request, saved)

    async def _take_into_use(self, request: TrainRequest, result: TrainResult) -> TrainResult:
        waited = await self._calls.queue_seconds()
        wrong = self._wrong_answers()
        counted: dict[str, float] = {WRONG_METRIC: wrong - self._wrong_before}
        self._wrong_before = wrong
        if waited is not None:
            counted[QUEUE_METRIC] = waited
        result = _finite(result.model_copy(update={"metrics": result.metrics | counted}))
        if result.applied and result.step > self._models.registry.model(request.model).step:
            began = time.monotonic()
            problem = await self._models.swaps.advance(request.model, result.step)
            result = result.model_copy(update={"metrics": {**result.metrics, SWAP_METRIC: time.monotonic() - began}})
            if problem is not None:
                warning = f"Step {result.step} is saved, but the sampler has not loaded it yet: {problem}"
                result = result.model_copy(update={"warnings": (*result.warnings, warning)})
        await asyncio.to_thread(self._jobs.remove, request.id)
        return result


async def _last_event(running: AsyncGenerator[Event], feed: TrainFeed) -> Trained | Failed:
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


def _finite(result: TrainResult) -> TrainResult:
    """Metrics that are no finite numbers cannot travel as JSON: left out, and named in the warnings."""
    bad = sorted(name for name, value in result.metrics.items() if not math.isfinite(value))
    if not bad:
        return result
    metrics = {name: value for name, value in result.metrics.items() if name not in bad}
    warning = f"These metrics were no finite numbers: {', '.join(bad)}"
    return result.model_copy(update={"metrics": metrics, "warnings": (*result.warnings, warning)})
