"""Engines in actors on machines of a Ray cluster, as the server sees them."""

# pyright: reportUnknownMemberType=false
# ray's functions are partly typed.
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbook.base.errors import EngineError
from offbook.server.child_process import open_log

from .connection import ray_module
from .engine_actor import EngineActor, EngineNews, EnginePlace, RemoteEngine

logger = logging.getLogger(__name__)

START_SECONDS = 1800.0
"""Limit for a place on the cluster and the start there. Loading a large base from a slow disk takes minutes."""
WAIT_NOTICE = 20.0
"""Seconds without a place after which the log says what an engine waits for."""
KILLS_CHILDREN = "RAY_kill_child_processes_on_worker_exit"
"""Ray's setting by which an actor that ends kills its children, but not theirs: vLLM's starter could then not end vLLM."""
CONCURRENT = 16
"""Methods of an actor that run at once: one waits for the engine's end."""


@dataclass(frozen=True)
class RayPlacement:
    """Where engines go. `address`: the cluster's. `cpus`, `gpus`: what an engine reserves. `taken`: GPUs of this machine that
    the server uses, by nvidia-smi's index; Ray does not know of it."""

    address: str
    gpus: int = 0
    cpus: float = 1
    taken: frozenset[int] = frozenset()


async def start_engine(
    engine: RemoteEngine,
    placement: RayPlacement,
    title: str,
    log_path: Path,
    waits: Callable[[str | None], None] = lambda _: None,
) -> ActorProcess:
    """Place an actor on the cluster that this process is connected to, and start its engine. `log_path`: the file here to
    which its output is copied. `waits` is told what it waits for, and None at the end. Raises EngineError."""
    actor = await asyncio.to_thread(_placed, placement)
    try:
        place = await _place(actor, engine, placement, title, waits)
    except BaseException as error:
        kill(actor)
        if not isinstance(error, Exception):
            raise
        raise EngineError(f"{title} could not be started on the Ray cluster: {reason_of(error)}") from error
    return ActorProcess(actor, log_path, place)


def _placed(placement: RayPlacement) -> Any:
    """A new actor, which Ray places as soon as a machine has room."""
    wanted: dict[str, Any] = {"num_cpus": placement.cpus, "num_gpus": placement.gpus}
    options = wanted | {"scheduling_strategy": "SPREAD", "max_concurrency": CONCURRENT, "max_restarts": 0}
    options |= {"runtime_env": {"env_vars": {KILLS_CHILDREN: "0"}}}
    return ray_module().remote(EngineActor).options(**options).remote()


async def _place(
    actor: Any, engine: RemoteEngine, placement: RayPlacement, title: str, waits: Callable[[str | None], None]
) -> EnginePlace:
    """Start the engine once the actor has a place. Raises what the actor raised, TimeoutError, EngineError."""
    starting = asyncio.ensure_future(answer_of(actor.start.remote(engine)))
    detail = ""
    try:
        await asyncio.wait([starting], timeout=WAIT_NOTICE)
        if not starting.done():
            detail = (
                f"{title} has not started on the Ray cluster after {WAIT_NOTICE:g} s: it needs a machine with "
                f"{placement.cpus:g} free CPU and {placement.gpus} free GPU"
                + (" (on CPUs alone: --device cpu)" if placement.gpus else "")
            )
            waits(detail)
            logger.warning("%s", detail)
        place: EnginePlace = await asyncio.wait_for(starting, START_SECONDS)
    except TimeoutError:
        raise EngineError(f"no machine had room for it within {START_SECONDS:.0f} s: {detail}") from None
    finally:
        starting.cancel()
        waits(None)
    here = ray_module().get_runtime_context().get_node_id()
    if place.node == here and (both := sorted(placement.taken & set(place.gpus))):
        raise EngineError(
            f"Ray placed it on GPU {both[0]} of this machine, which the server uses: start Ray here without that GPU "
            "(CUDA_VISIBLE_DEVICES=... ray start), or name another with --train-gpus"
        )
    return place


@dataclass
class ActorProcess:
    """The engine of an actor, with what `Child` has for a process of this machine. Its log is copied to a file here."""

    actor: Any
    log_path: Path
    place: EnginePlace
    returncode: int | None = None
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._ending = "still running"
        self.log, file = open_log(self.log_path)
        file.close()
        self._watch = asyncio.create_task(self._follow())

    def ending(self) -> str:
        """How the engine ended, or its actor, for a message."""
        return self._ending

    def kill(self) -> None:
        """Kill the actor, and with it the engine."""
        kill(self.actor)

    async def stop(self, deadline: float) -> None:
        """End the engine, at the latest after `deadline` seconds, and then its actor."""
        with suppress(Exception):  # the actor has ended, or does not answer; it is killed in any case
            await asyncio.wait_for(answer_of(self.actor.stop.remote(deadline)), deadline + 2)
        self.kill()
        await asyncio.wait([self._watch], timeout=deadline)
        self._watch.cancel()

    async def _follow(self) -> None:
        """Copy the log until the engine or its actor has ended. Always sets `exited`."""
        position = 0
        try:
            while self.returncode is None:
                news: EngineNews = await answer_of(self.actor.news.remote(position))
                position += len(news.log)
                if news.log:
                    self._append(news.log)
                if news.code is not None:
                    self._ending, self.returncode = news.ending, news.code
        except Exception as error:  # noqa: BLE001  # ray's: the actor is gone, or its machine
            self._ending, self.returncode = f"its Ray actor is gone: {reason_of(error)}", -9
            self.kill()
        finally:
            self.exited.set()

    def _append(self, output: bytes) -> None:
        """Copy output of the engine; it goes on without its log where that cannot be written."""
        try:
            with self.log_path.open("ab") as file:
                file.write(output)
        except OSError as error:
            logger.warning("%s cannot be written, %d bytes of the log are lost: %s", self.log_path, len(output), error)


async def answer_of(reference: Any) -> Any:
    """The result of an actor's method. Raises what the method raised, and ray's errors."""
    return await asyncio.wrap_future(reference.future())


def kill(actor: Any) -> None:
    ray = ray_module()
    if ray.is_initialized():
        ray.kill(actor, no_restart=True)


def reason_of(error: BaseException) -> str:
    """Ray's error, or the one of the actor's method that it wraps, in one line."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error).strip()
    return " ".join(text.split())[:500] or type(error).__name__
