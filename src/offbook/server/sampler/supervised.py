"""One sampler: its chat completions in vLLM's HTTP dialect, its loaded adapters, and the supervisor that starts it,
watches it, and starts it again with its adapters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

import aiohttp
import httpx
import orjson

from offbook.base.errors import EngineError
from offbook.base.types import Json

from .transport import (
    BROKEN,
    CHAT,
    COMPLETION,
    MAX_ANSWER,
    SERVED_NAME,
    CallClient,
    Reply,
    SamplerConnection,
    error_text,
    read,
    reason_of,
)

logger = logging.getLogger(__name__)

R = TypeVar("R")
"""Type of an answer."""
SamplerState = Literal["starting", "ok", "failed", "stopped"]
"""ok: calls are answered. starting: calls wait. failed: calls get the reason as an error; a later call starts it
again."""


class SamplerClient:
    """Sends calls to one sampler. A call is retried once if the sampler dies while it runs."""

    def __init__(self, sampler: SupervisedSampler) -> None:
        self._sampler = sampler
        self._changed = asyncio.Condition()
        self._awake = True
        self._sleeping = asyncio.Lock()
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """Number of calls that have not been answered completely."""
        return self._in_flight

    @property
    def awake(self) -> bool:
        """False from when the sampler is asked to sleep until it has woken. Calls that arrive meanwhile wait."""
        return self._awake

    async def post(self, payload: Mapping[str, Json], limit: int = MAX_ANSWER, trajectory: str | None = None) -> Reply:
        """Send a call and return the whole answer, whatever its HTTP status. With `prompt` it is a completion, else a chat.

        A pool sends calls of one `trajectory` to one member, which has their prefix cached.
        Raises EngineError if the sampler cannot answer, and WrongAnswer for more than `limit` bytes.
        """
        del trajectory
        body, path = self._body(payload), _path(payload)

        async def whole(connection: SamplerConnection) -> Reply:
            client = connection.calls
            response = await client.open(body, path)
            try:
                return Reply(response.status, await read(response, limit))
            finally:
                client.done(response)

        async with self._turn():
            return await self._sampler.send(whole)

    @asynccontextmanager
    async def stream(
        self, payload: Mapping[str, Json], trajectory: str | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Open a streamed call; `trajectory` as in `post`.

        Entered at the response's first bytes; leaving cancels it. Raises EngineError.
        """
        del trajectory
        body, path = self._body(payload), _path(payload)

        async def opened(connection: SamplerConnection) -> tuple[CallClient, aiohttp.ClientResponse]:
            return connection.calls, await connection.calls.open(body, path)

        async with self._turn():
            client, response = await self._sampler.send(opened)
            try:
                yield response
            except aiohttp.ClientError as error:
                raise EngineError(await self._sampler.explain(error)) from error
            finally:
                client.done(response)

    @asynccontextmanager
    async def asleep(self, *, keep_weights: bool = False) -> AsyncGenerator[None]:
        """Free the sampler's GPU memory inside the block; with `keep_weights`, only its KV cache.

        Entering waits for the calls in flight. Calls that arrive inside the block wait for its end. Raises EngineError.
        """
        async with self._sleeping:
            await self._sampler.ready()
            async with self._changed:
                self._awake = False
                await self._changed.wait_for(lambda: not self._in_flight)
            try:
                try:
                    await self._sleep(keep_weights)
                    yield
                finally:
                    await self._wake()
            finally:
                async with self._changed:
                    self._awake = True
                    self._changed.notify_all()

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """Count one call as in flight inside the block. Waits until the sampler is awake."""
        if not self._awake:
            async with self._changed:
                await self._changed.wait_for(lambda: self._awake)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._awake:
                async with self._changed:
                    self._changed.notify_all()

    async def _sleep(self, keep_weights: bool) -> None:
        """Put vLLM to sleep. Level 1 moves the weights to host memory and drops the KV cache.

        Level 0 only pauses the scheduler, which vLLM requires before it releases the KV cache.
        """
        if keep_weights:
            await self._command("/sleep?level=0&mode=wait")
            await self._command("/release_kv_cache_memory")
        else:
            await self._command("/sleep?level=1&mode=wait")

    async def _wake(self) -> None:
        """Wake the sampler, or restart it if it does not wake: the train step that is done must not fail now."""
        try:
            await self._command("/wake_up")
        except EngineError as error:
            logger.error("The sampler did not wake up; restarting it: %s", error)
            await self._sampler.restart()

    async def _command(self, path: str) -> None:
        response = await self._sampler.command(path)
        if response.is_error:
            raise EngineError(f"The sampler refused {path}: {reason_of(response)}")

    def _body(self, payload: Mapping[str, Json]) -> bytes:
        if payload["model"] == SERVED_NAME != self._sampler.served_name:
            payload = {**payload, "model": self._sampler.served_name}
        return orjson.dumps(payload)


def _path(payload: Mapping[str, Json]) -> str:
    """Where a call is sent: a prompt instead of messages is a completion."""
    return COMPLETION if "prompt" in payload else CHAT


LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class LoadedAdapters:
    """The adapters of one sampler by name. A sampler that was restarted loads all of them again."""

    def __init__(self, sampler: SupervisedSampler) -> None:
        self._sampler = sampler
        self._folders: dict[str, Path] = {}

    @property
    def loaded(self) -> Collection[str]:
        """The names of the adapters. A sampler that is starting loads them before it answers calls."""
        return self._folders

    def remember(self, adapter: str, folder: Path) -> None:
        """Load the adapter at the sampler's next start."""
        self._folders.setdefault(adapter, folder)

    def forget(self, adapter: str) -> None:
        """Do not load the adapter at the sampler's next start."""
        self._folders.pop(adapter, None)

    async def load(self, adapter: str, folder: Path) -> None:
        """Load a LoRA folder under the name `adapter`; a loaded name is left as it is. Raises EngineError."""
        if adapter in self._folders:
            return
        response = await self._sampler.command(LOAD, _lora(adapter, folder))
        if _rejected(response):
            raise EngineError(f"The sampler could not load {adapter} from {folder}: {reason_of(response)}")
        self._folders[adapter] = folder

    async def unload(self, adapter: str) -> None:
        """Unload an adapter; an unknown name is ignored. Raises EngineError."""
        if self._folders.pop(adapter, None) is None:
            return
        response = await self._sampler.command(UNLOAD, {"lora_name": adapter})
        if response.is_error and response.status_code != 404:
            raise EngineError(f"The sampler could not unload {adapter}: {reason_of(response)}")

    async def reload(self, control: httpx.AsyncClient) -> None:
        """Load every adapter into a sampler that has just started, also those that are remembered meanwhile. Drops and logs
        those that it rejects.

        Raises httpx.TransportError, EngineError.
        """
        reloaded: set[str] = set()
        while missing := [adapter for adapter in self._folders if adapter not in reloaded]:
            adapter, folder = missing[0], self._folders[missing[0]]
            reloaded.add(adapter)
            response = await control.post(LOAD, json=_lora(adapter, folder))
            if _rejected(response):
                self.forget(adapter)
                logger.error(
                    "The restarted sampler rejected adapter %s at %s: %s", adapter, folder, reason_of(response)
                )


def _lora(adapter: str, folder: Path) -> dict[str, str]:
    return {"lora_name": adapter, "lora_path": str(folder)}


def _rejected(response: httpx.Response) -> bool:
    """Whether a load failed. vLLM also answers with an error if the name is "already" loaded, which is no failure."""
    return response.is_error and "already" not in response.text


RETRY_SECONDS = 15.0
"""A call that arrives this long after a failed start triggers another start. Earlier calls get the error."""


class SupervisedSampler:
    """A supervised sampler, alone or a member of a pool.

    Subclasses start it (`_launch`) and watch it (`_until_dead`): `child_sampler.py`, `running_sampler.py`. Those that own a
    process also end it (`stop`, `kill`, `restart`) and tell a dead one from a broken connection (`explain`).
    A request waits for the sampler and is sent again once if the connection breaks.
    """

    served_name = SERVED_NAME
    """The sampler's own name for the base."""
    has_others = False
    """Set by a pool with other samplers: when this one is gone, requests fail at once, and the pool resends them."""
    must_start = True
    """A server does not start without it. False for one that is started elsewhere, as long as the pool has another."""
    shares_gpu = True
    """Whether it sleeps while a train step needs the GPU. False for a member of a pool with GPUs of its own."""

    max_starts = 3
    """Failed starts in a row after which waiting calls get the error."""

    def __init__(self) -> None:
        self.connection: SamplerConnection | None = None
        self.calls = SamplerClient(self)
        self.adapters = LoadedAdapters(self)
        self._supervisor: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._failed_at = 0.0
        self._state: SamplerState = "stopped"
        self._detail: str | None = None
        self._restarts = 0

    @property
    def state(self) -> SamplerState:
        """The state. `ready` waits while it is "starting"."""
        return self._state

    @property
    def detail(self) -> str | None:
        """Why the sampler failed, or the progress of its start."""
        return self._detail

    @property
    def restarts(self) -> int:
        """How often it was started again, after a death or a failed start."""
        return self._restarts

    def start(self) -> None:
        """Start the supervisor, which starts the sampler. Needs a running event loop."""
        self._state = "starting"
        self._supervisor = asyncio.create_task(self._supervise(), name="sampler")

    async def ready(self) -> None:
        """Wait until calls are answered. Raises EngineError with the reason of a failed start."""
        if self._state == "failed" and time.monotonic() - self._failed_at > RETRY_SECONDS:
            await self._become("starting")
            self._wanted.set()
        if self._state == "starting":
            async with self._changed:
                await self._changed.wait_for(lambda: self._state != "starting")
        if self._state != "ok":
            raise EngineError(self._detail or "The sampler is stopped: the server is shutting down")

    async def started(self) -> None:
        """Wait until the server may go on with its start: here, `ready`; a pool waits for all members that this server starts."""
        await self.ready()

    async def stop(self, deadline: float = 10.0) -> None:
        """Stop the supervisor and close the connection; subclasses stop their process within `deadline` seconds."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        await self._become("stopped")
        await self._disconnect()

    def kill(self) -> None:
        """Kill the sampler if it is a child of this process; here, do nothing."""

    async def explain(self, error: Exception) -> str:
        """Why a connection broke, in words. In a subclass, `state` is no longer "ok" afterwards if the sampler is gone."""
        return f"the connection to the sampler broke: {error_text(error)}"

    async def restart(self) -> None:
        """Restart the sampler if it is a child of this process; here, do nothing."""

    async def send(self, request: Callable[[SamplerConnection], Awaitable[R]]) -> R:
        """The answer to a request. Raises EngineError if there is no sampler, or the connection breaks twice."""
        for attempt in (1, 2):
            await self.ready()
            connection = self.connection
            assert connection is not None, "ready() connects"
            try:
                return await request(connection)
            except (*BROKEN, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not connection.closed:
                    raise
                reason = await self.explain(error)
                if self.has_others and self.state != "ok":
                    raise EngineError(reason) from error
                if attempt == 2:
                    raise EngineError(f"The call was tried twice: {reason}") from error
                logger.warning("Retrying a call: %s", reason)
        raise AssertionError("unreachable")

    async def command(self, path: str, body: Mapping[str, str] | None = None) -> httpx.Response:
        """POST to a control route of the sampler. Returns the response, whatever its status. Raises EngineError."""
        return await self.send(lambda connection: connection.control.post(path, json=body))

    async def _launch(self) -> None:
        raise NotImplementedError

    async def _until_dead(self) -> str:
        raise NotImplementedError

    def _connect(self, url: str, *, socket: Path | None = None, key: str | None = None) -> SamplerConnection:
        self.connection = SamplerConnection(url, socket=socket, key=key)
        return self.connection

    async def _disconnect(self) -> None:
        if self.connection is not None:
            await self.connection.close()

    async def _become(self, state: SamplerState) -> None:
        self._state = state  # at once: whoever sees "starting" may still add an adapter for the reload
        async with self._changed:
            self._changed.notify_all()

    async def _supervise(self) -> None:
        """Keep the sampler answering until cancelled."""
        failures = 0
        while True:
            try:
                await self._launch()
            except (
                Exception
            ) as error:  # waiting calls must get an error; an unexpected one is logged with its traceback
                known = isinstance(error, EngineError)
                reason = str(error) if known else f"The sampler could not be started: {type(error).__name__}: {error}"
                failures += 1
                if self._restarts or not known:
                    logger.error("%s", reason, exc_info=None if known else error)
                if failures < self.max_starts and self._restarts:
                    await asyncio.sleep(failures)
                    continue
                await self._give_up(reason)
                failures = 0
                self._restarts += 1
                continue
            failures = 0
            await self._become("ok")
            ending = await self._until_dead()
            await self._become("starting")
            self._restarts += 1
            logger.error("%s", ending)

    async def _give_up(self, reason: str) -> None:
        """Let waiting calls fail with the reason. Returns when a later call triggers another start."""
        self._wanted.clear()
        self._failed_at = time.monotonic()
        self._detail = reason
        await self._become("failed")
        await self._wanted.wait()
        self._detail = None
