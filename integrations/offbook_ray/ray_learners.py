"""The learners of a team that are on machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from offbook.base.devices import learner_settings
from offbook.base.errors import BackendError, EngineError, MissingExtraError
from offbook.engine.protocol import LEARNER_MODULE, TEAM_KEY_VARIABLE
from offbook.server.base_model import BaseModelPath

from .actor_process import ActorProcess, RayPlacement, start_engine
from .connection import connect
from .engine_actor import remote_engine

logger = logging.getLogger(__name__)


class RayLearners:
    """Learners `first` to `first` + `count` - 1 of a team, each in an actor. A start places new ones."""

    def __init__(
        self,
        base: BaseModelPath,
        placement: RayPlacement,
        count: int,
        words: Sequence[str],
        log_path: Path,
    ) -> None:
        """`words`: the options of a learner. `log_path`: the first learner's, beside which theirs are
        copied."""
        self._base = base
        self._placement = placement
        self._count = count
        self._words = words
        self._log_path = log_path
        self._actors: list[ActorProcess] = []
        self.key = ""
        """What all learners of the team must have; new with each start."""

    async def start(self, first: int) -> list[str]:
        """Place them, and return where they listen for the first learner. Raises EngineError."""
        self.kill()
        self.key = secrets.token_urlsafe(32)
        try:
            await asyncio.to_thread(connect, self._placement.address, option="--cluster ray")
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._start(rank)) for rank in range(first, first + self._count)]
        except (BackendError, MissingExtraError) as error:
            raise EngineError(str(error)) from error
        except BaseExceptionGroup as failures:
            self.kill()
            raise failures.exceptions[0] from None
        except BaseException:
            self.kill()
            raise
        return [start.result() for start in starts]

    async def lost(self) -> str:
        """Wait until one of them has ended; returns which and how."""
        actors = tuple(self._actors)
        waiting = [asyncio.create_task(actor.exited.wait()) for actor in actors]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waiting:
                wait.cancel()
        ended = next(actor for actor in actors if actor.exited.is_set())
        return (
            f"the learner at {ended.place.host}:{ended.place.port} ended ({ended.ending()}). Its log: {ended.log_path}"
        )

    def kill(self) -> None:
        """Kill their actors without waiting, and the learners with them."""
        for actor in self._actors:
            actor.kill()
        self._actors = []

    async def stop(self, deadline: float) -> None:
        """End them, at the latest after `deadline` seconds."""
        actors, self._actors = self._actors, []
        await asyncio.gather(*(actor.stop(deadline) for actor in actors))

    async def _start(self, rank: int) -> str:
        """Place learner `rank`, and return where it listens. Raises EngineError."""
        device = "cuda" if self._placement.gpus else "cpu"  # the one that is reserved, whatever its number is here
        words = [*self._words, "--device", device, "--rank", str(rank), "--listen", "{host}", "{port}"]
        try:
            engine = await asyncio.to_thread(remote_engine, LEARNER_MODULE, self._base, words)
        except OSError as error:
            raise EngineError(f"The learner could not be started: {error}") from error
        engine = replace(engine, environment={**learner_settings(), TEAM_KEY_VARIABLE: self.key})
        log = self._log_path.with_stem(f"{self._log_path.stem}-{rank + 1}")
        actor = await start_engine(engine, self._placement, f"Learner {rank + 1}", log)
        self._actors.append(actor)
        return f"{actor.place.host}:{actor.place.port}"
