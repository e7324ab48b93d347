"""The door of the server: what a package beside the core adds to it, and what it may use there.

A wing names a subclass of `ServerWing` as an entry point of the group `offbook.server`, a class of options under the same name
in `offbook.serve_options`. The core knows none of them by name. docs/architecture.md has an example.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from fastapi import APIRouter, FastAPI, Request
from sqlalchemy import MetaData
from starlette.types import ASGIApp

from offbook import plugins
from offbook.base.server_options import ServerOptions

if TYPE_CHECKING:
    from .base_model import BaseModelPath
    from .calls.recorder import Recorder
    from .models.checkpoint_swaps import ModelServices
    from .models.registry import ServedModel
    from .records.store import Store
    from .sampler.engine_choice import EngineChoice
    from .sampler.pool import Sampler
    from .training.learner_client import LearnerClient


logger = logging.getLogger(__name__)


class TrainRequests(Protocol):
    """What a wing sees of the train requests."""

    @property
    def running(self) -> str | None:
        """The id of the request that is being applied, or None."""
        ...


class ServerDoor(Protocol):
    """What a wing may use of the server that it is part of. All of it is open while the wing is."""

    @property
    def options(self) -> ServerOptions:
        """The options of `offbook serve`."""
        ...

    @property
    def store(self) -> Store:
        """The records: `read` and `write` with the wing's own functions of a connection, `finished`, `finish`."""
        ...

    @property
    def base(self) -> BaseModelPath:
        """The base model."""
        ...

    @property
    def models(self) -> ModelServices:
        """The models: `registry` finds one by its name, and a call's step."""
        ...

    @property
    def recorder(self) -> Recorder:
        """Where calls are recorded; `sampled` are those that this server sampled."""
        ...

    @property
    def sampler(self) -> Sampler:
        """The inference engine: its state."""
        ...

    @property
    def engine(self) -> EngineChoice:
        """The options of the inference engine and the loader."""
        ...

    @property
    def learner(self) -> LearnerClient | None:
        """The learner; None with --inference-only."""
        ...

    @property
    def training(self) -> TrainRequests:
        """The train requests."""
        ...


class ServerWing:
    """What a wing adds to a running server. Override what it needs; each method says when the server calls it.

    What a wing raises in its middleware or its routes is that request's error, so it catches what must not fail one. What it
    raises about a step, or at the server's end, is logged: the step and the end go on.
    """

    name: ClassVar[str]
    """The name of its entry points."""
    tables: ClassVar[MetaData | None] = None
    """Tables of its own in the records. They are created if they are missing, and never changed."""
    router: ClassVar[APIRouter | None] = None
    """Its HTTP routes, behind the same access checks as all others. A handler takes the wing as `Cls.of(request)`."""

    def __init__(self, options: Any, server: ServerDoor) -> None:
        """`options`: an object of the wing's class in `offbook.serve_options`; None if it has none."""
        self.options = options
        self.server = server

    @classmethod
    def wanted(cls, options: Any) -> bool:
        """Whether the options ask for this wing. Otherwise the server leaves it out, with its routes."""
        del options
        return True

    @classmethod
    def prepare(cls, options: Any, server: ServerOptions) -> None:
        """Called with the directory locked, before models and records are opened. Raises ConfigError, StoreError."""
        del options, server

    @classmethod
    def of(cls, request: Request) -> Self:
        """The wing of the server that received a request."""
        wing = request.app.state.services.wings[cls.name]
        assert isinstance(wing, cls)
        return wing

    async def open(self) -> None:
        """Called in the event loop once all services of the core are open. Raises ConfigError, StoreError."""

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """The application with what this wing does before its routing; by default `app` itself."""
        return app

    def add_to(self, app: FastAPI) -> None:
        """Called when the application is built, for what is no route: handlers of errors, mounted files."""
        del app

    def ready_rows(self, url: str) -> Sequence[tuple[str, str]]:
        """Lines for the message of a ready server: a word and its value."""
        del url
        return ()

    def answers_without_sampler(self) -> bool:
        """Whether the server is of use although its sampler could not be started."""
        return False

    def model_changed(self) -> None:
        """A model has a new step."""

    def steps_held(self, model: ServedModel) -> int:
        """How many of a model's newest steps the wing still reads, so that nobody deletes them."""
        del model
        return 0

    async def close(self, deadline: float) -> None:
        """Called when the server ends, after the running step and calls, before the records are closed; and if `open` failed.
        Has `deadline` seconds."""
        del deadline


def wing_classes(options: ServerOptions) -> list[type[ServerWing]]:
    """The installed wings that the options ask for. Raises ConfigError, MissingExtraError."""
    classes = [plugins.load_class("offbook.server", name, ServerWing) for name in plugins.names("offbook.server")]
    return [wing for wing in classes if wing.wanted(options.wings.get(wing.name))]


def tell_of_new_step(wings: Mapping[str, ServerWing]) -> None:
    """Tell each wing that a model has a new step."""
    for wing in wings.values():
        with _contained(wing):
            wing.model_changed()


async def close_wings(wings: Mapping[str, ServerWing], deadline: float) -> None:
    """Close all wings at once."""

    async def close(wing: ServerWing) -> None:
        with _contained(wing):
            await wing.close(deadline)

    await asyncio.gather(*map(close, wings.values()))


@contextmanager
def _contained(wing: ServerWing) -> Generator[None]:
    try:
        yield
    except Exception:  # whatever a wing raises, the core's own work goes on
        logger.exception("The wing %r failed", wing.name)
