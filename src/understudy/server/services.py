"""What the routers work with: one set of services per server, handed to each route as `ServicesDep`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from ..config import ServerOptions
from .calls.recorder import Recorder
from .loop_lag import LoopLag
from .models.base_model import BaseModelPath
from .models.model_services import ModelServices
from .records.store import Store
from .sampler.choice import EngineChoice
from .sampler.sampler import Sampler
from .training.archives import Archives
from .training.history import TrainHistory
from .training.learner_client import LearnerClient
from .training.queue import TrainQueue


@dataclass(frozen=True)
class Services:
    """`learner` is None with --inference-only."""

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
    lag: LoopLag = field(default_factory=LoopLag)


async def _services_of(request: Request) -> Services:
    """The services of the app that got this request. FastAPI would call a plain function in a thread."""
    return request.app.state.services


ServicesDep = Annotated[Services, Depends(_services_of)]
