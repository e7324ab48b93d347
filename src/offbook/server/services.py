"""The services of a server, which each route gets as a parameter of type `ServicesDep`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from offbook.base.server_options import ServerOptions

from .base_model import BaseModelPath
from .calls.recorder import Recorder
from .models.checkpoint_swaps import ModelServices
from .records.store import Store
from .sampler.engine_choice import EngineChoice
from .sampler.pool import Sampler
from .training.archives import Archives
from .training.history import TrainHistory
from .training.learner_client import LearnerClient
from .training.queue import TrainQueue
from .wing import ServerWing


@dataclass(frozen=True)
class Services:
    """All services of one server. `learner` is None with --inference-only. `wings`: by name."""

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


async def _services_of(request: Request) -> Services:
    """The services of the app that received the request. Async, since FastAPI calls plain functions in a thread."""
    return request.app.state.services


ServicesDep = Annotated[Services, Depends(_services_of)]
