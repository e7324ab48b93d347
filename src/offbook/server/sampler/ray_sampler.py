"""A sampler that runs in an actor on a machine of a Ray cluster."""

# pyright: reportUnknownMemberType=false
# ray's functions are partly typed.
from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from offbook.base.errors import BackendError, EngineError, MissingExtraError
from offbook.base.ray_cluster import connect, ray_module

from ...engine.checkpoint_files import ADAPTER, ADAPTER_CONFIG
from ..child_process import open_log
from .child_sampler import START_SECONDS, ChildSampler
from .ray_engine import EngineActor, EngineNews, EnginePlace, RemoteEngine

logger = logging.getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable of the engine with the key that calls must have."""
WAIT_NOTICE = 20.0
"""Seconds without a place for a replica after which the log says what it waits for."""
KILLS_CHILDREN = "RAY_kill_child_processes_on_worker_exit"
"""Ray's setting by which an actor that ends kills its children, but not theirs: vLLM's starter could then not end vLLM."""
CONCURRENT = 16
"""Methods of an actor that run at once: one waits for the engine's end."""


@dataclass(frozen=True)
class RayPlacement:
    """Where replicas go. `address`: the cluster's. `cpus`, `gpus`: what a replica reserves. `taken`: GPUs of this machine that
    the learner uses, by nvidia-smi's index; Ray does not know of it."""

    address: str
    gpus: int = 0
    cpus: float = 1
    taken: frozenset[int] = frozenset()


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
            await asyncio.to_thread(connect, self._placement.address, option="--ray")
            engine = await asyncio.to_thread(self._engine)
        except (BackendError, MissingExtraError, OSError) as error:
            raise EngineError(f"{self._title} could not be started: {error}") from error
        actor = await asyncio.to_thread(self._placed)
        engine = replace(engine, environment={**engine.environment, KEY_VARIABLE: key})
        try:
            place = await self._place(actor, engine)
        except BaseException as error:
            _kill(actor)
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"{self._title} could not be started on the Ray cluster: {_reason(error)}") from error
        child = ActorProcess(actor, self._log_path, place)
        return child, self._connect(place.url, key=key).control

    async def local_copy(self, adapter: str, folder: Path) -> Path:
        """Copy an adapter to the disk of the replica's machine, and return its path there. Raises EngineError, OSError."""
        files = await asyncio.to_thread(
            lambda: {name: (folder / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER)}
        )
        child = self._actor_process()
        try:
            self._copies[adapter] = await _answer(await asyncio.to_thread(child.actor.keep.remote, files))
        except Exception as error:  # ray's, or the actor's own: its disk may be full
            raise EngineError(f"{await self.explain(error)} ({_reason(error)})") from error
        return Path(self._copies[adapter])

    async def drop_copy(self, adapter: str) -> None:
        """Remove the copy of an adapter that is no longer loaded."""
        copy = self._copies.pop(adapter, None)
        if copy is not None:
            child = self._actor_process()
            try:
                await _answer(child.actor.drop.remote(copy))
            except Exception as error:  # noqa: BLE001  # ray's: the actor has ended, and its folder with it
                logger.debug("The copy of %s was not removed: %s", adapter, _reason(error))

    def _placed(self) -> Any:
        """A new actor, which Ray places as soon as a machine has room."""
        wanted: dict[str, Any] = {"num_cpus": self._placement.cpus, "num_gpus": self._placement.gpus}
        options = wanted | {"scheduling_strategy": "SPREAD", "max_concurrency": CONCURRENT, "max_restarts": 0}
        options |= {"runtime_env": {"env_vars": {KILLS_CHILDREN: "0"}}}
        return ray_module().remote(EngineActor).options(**options).remote()

    async def _place(self, actor: Any, engine: RemoteEngine) -> EnginePlace:
        """Start the engine once the actor has a place. Raises what the actor raised, TimeoutError, EngineError."""
        starting = asyncio.ensure_future(_answer(actor.start.remote(engine)))
        try:
            await asyncio.wait([starting], timeout=WAIT_NOTICE)
            if not starting.done():
                self._detail = (
                    f"{self._title} has not started on the Ray cluster after {WAIT_NOTICE:g} s: it needs a machine with "
                    f"{self._placement.cpus:g} free CPU and {self._placement.gpus} free GPU"
                    + (" (on CPUs alone: --device cpu)" if self._placement.gpus else "")
                )
                logger.warning("%s", self._detail)
            place: EnginePlace = await asyncio.wait_for(starting, START_SECONDS)
        except TimeoutError:
            raise EngineError(f"no machine had room for it within {START_SECONDS:.0f} s: {self._detail}") from None
        finally:
            starting.cancel()
            self._detail = None
        here = ray_module().get_runtime_context().get_node_id()
        if place.node == here and (both := sorted(self._placement.taken & set(place.gpus))):
            raise EngineError(
                f"Ray placed it on GPU {both[0]} of this machine, which the learner uses: start Ray here without that GPU "
                "(CUDA_VISIBLE_DEVICES=... ray start), or name another with --train-gpus"
            )
        return place

    def _actor_process(self) -> ActorProcess:
        assert isinstance(self._child, ActorProcess), "begin places an actor"
        return self._child


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
        _kill(self.actor)

    async def stop(self, deadline: float) -> None:
        """End the engine, at the latest after `deadline` seconds, and then its actor."""
        with suppress(Exception):  # the actor has ended, or does not answer; it is killed in any case
            await asyncio.wait_for(_answer(self.actor.stop.remote(deadline)), deadline + 2)
        self.kill()
        await asyncio.wait([self._watch], timeout=deadline)
        self._watch.cancel()

    async def _follow(self) -> None:
        """Copy the log until the engine or its actor has ended. Always sets `exited`."""
        position = 0
        try:
            while self.returncode is None:
                news: EngineNews = await _answer(self.actor.news.remote(position))
                position += len(news.log)
                if news.log:
                    self._append(news.log)
                if news.code is not None:
                    self._ending, self.returncode = news.ending, news.code
        except Exception as error:  # noqa: BLE001  # ray's: the actor is gone, or its machine
            self._ending, self.returncode = f"its Ray actor is gone: {_reason(error)}", -9
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


async def _answer(reference: Any) -> Any:
    """The result of an actor's method. Raises what the method raised, and ray's errors."""
    return await asyncio.wrap_future(reference.future())


def _kill(actor: Any) -> None:
    ray = ray_module()
    if ray.is_initialized():
        ray.kill(actor, no_restart=True)


def _reason(error: BaseException) -> str:
    """Ray's error, or the one of the actor's method that it wraps, in one line."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error).strip()
    return " ".join(text.split())[:500] or type(error).__name__
