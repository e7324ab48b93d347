"""The services of a server, which each route gets as a parameter of type `ServicesDep`, and the lag of its event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from offbook.base.server_options import ServerOptions

from .base_model import BaseModelPath
from .calls.recorder import Recorder
from .idle_exit import Activity
from .models.checkpoint_swaps import ModelServices
from .records.store import Store
from .sampler.engine_choice import EngineChoice
from .sampler.sampler import Sampler
from .training.archives import Archives
from .training.history import TrainHistory
from .training.learner_client import LearnerClient
from .training.queue import TrainQueue
from .wing import ServerWing

TICK_SECONDS = 0.25
"""Interval of the measurements. Each wakes an idle server, which costs some 0.1 ms of a processor: at 20 a second, 4 % of a call that comes alone."""
KEPT_SECONDS = 60.0
"""Measurements kept: those of the last minute."""


class LoopLag:
    """The lags of the last minute, in seconds. They are measured while `watch` runs."""

    def __init__(self, tick: float = TICK_SECONDS) -> None:
        self._tick = tick
        self._lags: deque[float] = deque(maxlen=round(KEPT_SECONDS / tick))

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(self._tick)
            self._lags.append(time.perf_counter() - before - self._tick)

    def p99(self) -> float:
        """The 99th percentile of the lags in seconds; 0 before the first measurement."""
        lags = sorted(self._lags)
        return max(0.0, lags[int(0.99 * (len(lags) - 1))]) if lags else 0.0


@dataclass(frozen=True)
class Services:
    """All services of one server. `learner` is None with --inference-only. `wings`: by name. `lag`: see LoopLag."""

    options: ServerOptions
    engine: EngineChoice
    base: BaseModelPath
    store: Store
    models: ModelServices
    sampler: Sampler
    learner: LearnerClient | None
    recorder: Recorder
    training: TrainQueue
    train_history: TrainHistory
    archives: Archives
    wings: dict[str, ServerWing] = field(default_factory=dict[str, ServerWing])
    lag: LoopLag = field(default_factory=LoopLag)
    activity: Activity = field(default_factory=Activity)


async def _services_of(request: Request) -> Services:
    """The services of the app that received the request. Async, since FastAPI calls plain functions in a thread."""
    return request.app.state.services


ServicesDep = Annotated[Services, Depends(_services_of)]
