"""A sampler that runs in an actor on a machine of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx

from offbook.base.errors import BackendError, EngineError, MissingExtraError
from offbook.engine.checkpoint_files import ADAPTER, ADAPTER_CONFIG
from offbook.server.sampler.child_sampler import ChildSampler

from .actor_process import ActorProcess, RayPlacement, answer_of, reason_of, start_engine
from .connection import connect
from .engine_actor import RemoteEngine

logger = logging.getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable of the engine with the key that calls must have."""


class RaySampler(ChildSampler):
    """A replica on a Ray cluster. Each start places a new actor, so a machine that is lost is replaced by another.

    The engine listens on the address of its machine, with a key of its own. It gets copies of the adapters, on its own disk.
    """

    def __init__(
        self, engine: Callable[[], RemoteEngine], placement: RayPlacement, log_path: Path, *, name: str
    ) -> None:
        """`engine` is called for every start. `log_path`: the file here to which its output is copied."""
        super().__init__(lambda socket: [], log_path, name=name)
        self._engine = engine
        self._placement = placement
        self._copies: dict[str, str] = {}

    async def begin(self) -> tuple[ActorProcess, httpx.AsyncClient]:
        """Place an actor and start its engine. Raises EngineError."""
        if self._child is not None:
            self._child.kill()  # it has ended; its actor may be left
        self._copies.clear()
        key = secrets.token_urlsafe(32)
        try:
            await asyncio.to_thread(connect, self._placement.address, option="--cluster ray")
            engine = await asyncio.to_thread(self._engine)
        except (BackendError, MissingExtraError, OSError) as error:
            raise EngineError(f"{self._title} could not be started: {error}") from error
        engine = replace(engine, environment={**engine.environment, KEY_VARIABLE: key})
        child = await start_engine(engine, self._placement, self._title, self._log_path, self._say)
        return child, self._connect(child.place.url, key=key).control

    async def local_copy(self, adapter: str, folder: Path) -> Path:
        """Copy an adapter to the disk of the replica's machine, and return its path there. Raises EngineError, OSError."""
        files = await asyncio.to_thread(
            lambda: {name: (folder / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER)}
        )
        child = self._actor_process()
        try:
            self._copies[adapter] = await answer_of(await asyncio.to_thread(child.actor.keep.remote, files))
        except Exception as error:  # ray's, or the actor's own: its disk may be full
            raise EngineError(f"{await self.explain(error)} ({reason_of(error)})") from error
        return Path(self._copies[adapter])

    async def drop_copy(self, adapter: str) -> None:
        """Remove the copy of an adapter that is no longer loaded."""
        copy = self._copies.pop(adapter, None)
        if copy is not None:
            child = self._actor_process()
            try:
                await answer_of(child.actor.drop.remote(copy))
            except Exception as error:  # noqa: BLE001  # ray's: the actor has ended, and its folder with it
                logger.debug("The copy of %s was not removed: %s", adapter, reason_of(error))

    def _say(self, detail: str | None) -> None:
        self._detail = detail

    def _actor_process(self) -> ActorProcess:
        assert isinstance(self._child, ActorProcess), "begin places an actor"
        return self._child
