"""A sampler, spoken to in vLLM's HTTP dialect: calls, adapters, and waiting while it is not there.

Who keeps it alive is `sampler_child.py` (a child of this server) or `sampler_running.py` (a vLLM that runs already).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

import aiohttp
import httpx
import orjson

from ...errors import EngineError
from ...types import Json
from .transport import BROKEN, SERVED_NAME, CallClient, Reply, asking, broken, reason_of

log = logging.getLogger(__name__)
R = TypeVar("R")

RETRY_SECONDS = 15.0
"""After that many seconds a sampler that could not be reached is tried again, when a call needs it."""

State = Literal["starting", "ok", "failed", "stopped"]


class SamplerClient:
    """One sampler. `adapters` are loaded again whenever it is there again. Subclasses supervise it."""

    served_name = SERVED_NAME
    """Its own name for the base."""
    max_starts = 3
    """Starts in a row that may fail before waiting calls fail with the reason."""
    has_others = False
    """Whether a call that it cannot answer goes to another one, instead of waiting for it."""

    def __init__(self) -> None:
        self._client: CallClient | None = None
        self._control: httpx.AsyncClient | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._adapters: dict[str, Path] = {}
        self._changed = asyncio.Condition()
        self._awake = True
        self._in_flight = 0
        self._failed_at = 0.0
        self._wanted = asyncio.Event()
        self._queued = (0.0, 0.0)
        self._state: State = "stopped"
        self._detail: str | None = None
        self._restarts = 0

    @property
    def pid(self) -> int | None:
        """The sampler's process id, where it is a child of this process and runs."""
        return None

    @property
    def state(self) -> State:
        return self._state

    @property
    def detail(self) -> str | None:
        """Why it does not answer, or how far its start has come."""
        return self._detail

    @property
    def restarts(self) -> int:
        return self._restarts

    @property
    def adapters(self) -> Mapping[str, Path]:
        return self._adapters

    @property
    def in_flight(self) -> int:
        """Calls that it is answering."""
        return self._in_flight

    # ---- life

    def start(self) -> None:
        """Begin in the background; `ready` waits for it."""
        self._state = "starting"
        self._supervisor = asyncio.create_task(self._supervise(), name="sampler")

    async def ready(self) -> None:
        """Wait until calls are answered. Raises EngineError with the reason when it cannot be had."""
        if self._state == "failed" and time.monotonic() - self._failed_at > RETRY_SECONDS:
            await self._become("starting")
            self._wanted.set()
        if self._state == "starting":
            async with self._changed:
                await self._changed.wait_for(lambda: self._state != "starting")
        if self._state != "ok":
            raise EngineError(self._detail or "The sampler is stopped: the server is ending")

    async def stop(self, deadline: float = 10.0) -> None:
        """End what this process began, within `deadline` seconds."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        await self._become("stopped")
        await self._close_clients()

    def kill(self) -> None:
        """End it at once, without waiting, where it is a child of this process."""

    # ---- calls

    async def post(self, payload: Mapping[str, Json]) -> Reply:
        """A whole chat completion, whatever its status. Retried once when the sampler died under it."""
        body = self._body(payload)

        async def asked(client: CallClient) -> Reply:
            response = await client.open(body)
            try:
                return Reply(response.status, await response.read())
            finally:
                client.done(response)

        async with self._turn():
            return await self._with_retry(asked)

    @asynccontextmanager
    async def stream(self, payload: Mapping[str, Json]) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A streamed chat completion, open at its first bytes. Leaving the context cancels it in the engine."""
        body = self._body(payload)

        async def opened(client: CallClient) -> tuple[CallClient, aiohttp.ClientResponse]:
            return client, await client.open(body)

        async with self._turn():
            client, response = await self._with_retry(opened)
            try:
                yield response
            except aiohttp.ClientError as error:
                raise EngineError(await self._death(error)) from error
            finally:
                client.done(response)

    @asynccontextmanager
    async def asleep(self) -> AsyncGenerator[None]:
        """The block has the GPU to itself: calls in flight end first, those that arrive wait. Raises EngineError."""
        await self.ready()
        async with self._changed:
            self._awake = False
            await self._changed.wait_for(lambda: not self._in_flight)
        try:
            await self._told("/sleep?level=1&mode=wait")
            try:
                yield
            finally:
                await self._wake()
        finally:
            async with self._changed:
                self._awake = True
                self._changed.notify_all()

    async def _wake(self) -> None:
        """What ran while it slept is done and must not fail now: a sampler that does not wake begins anew."""
        try:
            await self._told("/wake_up")
        except EngineError as error:
            log.error("The sampler did not wake and is started again: %s", error)
            await self._restart()

    def expect(self, adapter: str, folder: Path) -> None:
        """Load the adapter as soon as the sampler is there."""
        self._adapters.setdefault(adapter, folder)

    def forget(self, adapter: str) -> None:
        """Not to load it again."""
        self._adapters.pop(adapter, None)

    async def load(self, adapter: str, folder: Path) -> None:
        """Load a LoRA folder under a name; again is no fault. Raises EngineError."""
        if adapter in self._adapters:
            return
        body = {"lora_name": adapter, "lora_path": str(folder)}
        response = await self._with_retry(lambda _: self._ask("/v1/load_lora_adapter", body))
        if response.is_error and "already" not in response.text:
            raise EngineError(f"The sampler could not load {adapter} from {folder}: {reason_of(response)}")
        self._adapters[adapter] = folder

    async def unload(self, adapter: str) -> None:
        """Forget an adapter. Raises EngineError."""
        if self._adapters.pop(adapter, None) is None:
            return
        body = {"lora_name": adapter}
        response = await self._with_retry(lambda _: self._ask("/v1/unload_lora_adapter", body))
        if response.is_error and response.status_code != 404:
            raise EngineError(f"The sampler could not unload {adapter}: {reason_of(response)}")

    async def queue_seconds(self) -> float | None:
        """How long a call waited for its turn in the engine, on average since the last question; None when none did, or
        the engine does not count it."""
        if self.state != "ok" or self._control is None:
            return None
        try:
            text = (await self._control.get("/metrics", timeout=10.0)).text
        except (httpx.HTTPError, RuntimeError) as error:  # it ended meanwhile
            log.debug("no queue time: %s", error)
            return None
        spent, calls = _counted(text, "sum"), _counted(text, "count")
        before, self._queued = self._queued, (spent, calls)
        if calls < before[1]:
            before = (0.0, 0.0)  # it was restarted
        return (spent - before[0]) / (calls - before[1]) if calls > before[1] else None

    # ---- inside

    async def _supervise(self) -> None:
        failures = 0
        while True:
            try:
                await self._launch()
            except Exception as error:  # whoever waits must hear of it; one that is not foreseen is logged whole
                known = isinstance(error, EngineError)
                reason = str(error) if known else f"The sampler could not be started: {type(error).__name__}: {error}"
                failures += 1
                if self._restarts or not known:
                    log.error("%s", reason, exc_info=None if known else error)
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
            log.error("%s", ending)

    async def _launch(self) -> None:
        """Make it answer, its adapters loaded. Raises EngineError."""
        raise NotImplementedError

    async def _until_dead(self) -> str:
        """Returns when it answers no more, and says why."""
        raise NotImplementedError

    async def _restart(self) -> None:
        """Make it begin anew, where that is in this process's hands."""

    async def _death(self, error: Exception) -> str:
        """Why a connection broke, in words."""
        return f"the connection to the sampler broke: {broken(error)}"

    def _body(self, payload: Mapping[str, Json]) -> bytes:
        if payload["model"] == SERVED_NAME != self.served_name:
            payload = {**payload, "model": self.served_name}
        return orjson.dumps(payload)

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """One call in flight, begun while the sampler is awake."""
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

    async def _ask(self, path: str, body: Mapping[str, Json] | None = None) -> httpx.Response:
        assert self._control is not None, "ready means that there is a client"
        return await self._control.post(path, json=body)

    async def _told(self, path: str) -> None:
        response = await self._with_retry(lambda _: self._ask(path))
        if response.is_error:
            raise EngineError(f"The sampler refused {path}: {reason_of(response)}")

    def _connect(self, url: str, *, socket: Path | None = None, key: str | None = None) -> httpx.AsyncClient:
        """Open both ways to it, and give that of questions."""
        self._client = CallClient(url, socket=socket, key=key)
        self._control = asking(url, socket=socket, key=key)
        return self._control

    async def _close_clients(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._control is not None:
            await self._control.aclose()

    async def _with_retry(self, send: Callable[[CallClient], Awaitable[R]]) -> R:
        for attempt in (1, 2):
            await self.ready()
            client = self._client
            assert client is not None, "ready means that there is a client"
            try:
                return await send(client)
            except (*BROKEN, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not client.closed:
                    raise
                reason = await self._death(error)
                if self.has_others and self.state != "ok":
                    raise EngineError(reason) from error
                if attempt == 2:
                    raise EngineError(f"The call was tried twice: {reason}") from error
                log.warning("A call is tried again: %s", reason)
        raise AssertionError("unreachable")

    async def _give_up(self, reason: str) -> None:
        """Fail waiting calls with the reason, until a later call asks for another try."""
        self._wanted.clear()
        self._failed_at = time.monotonic()
        self._detail = reason
        await self._become("failed")
        await self._wanted.wait()
        self._detail = None

    async def _become(self, state: State) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()

    async def _reload(self) -> None:
        """Load every adapter again into a sampler that has just come up. Raises httpx.TransportError."""
        assert self._control is not None, "it has just come up"
        for adapter, folder in list(self._adapters.items()):
            body = {"lora_name": adapter, "lora_path": str(folder)}
            response = await self._control.post("/v1/load_lora_adapter", json=body)
            if response.is_error and "already" not in response.text:
                del self._adapters[adapter]
                log.error("Adapter %s at %s was not loaded again: %s", adapter, folder, reason_of(response))


def _counted(text: str, what: Literal["sum", "count"]) -> float:
    """The sum over all engines of vLLM's histogram of queue times."""
    return sum(float(value) for value in re.findall(rf"^vllm:request_queue_time_seconds_{what}\S* (\S+)$", text, re.M))
