"""The sampler child: started, watched, restarted with its adapters, and spoken to in vLLM's HTTP dialect."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar

import httpx
import orjson

from ..config import EngineOptions
from ..engine.protocol import SAMPLER_MODULE
from ..errors import EngineError
from ..types import Json
from .child import Child

log = logging.getLogger(__name__)
R = TypeVar("R")

START_SECONDS = 600.0
"""A large base on a slow disk takes minutes; a child that died is noticed at once."""
MAX_STARTS = 3
"""Starts in a row that may fail before waiting calls fail with the reason."""
RETRY_SECONDS = 15.0
"""After that many seconds a sampler that could not be started is tried again, when a call needs it."""
UNHEALTHY_SECONDS = 60.0
SERVED_NAME = "base"
"""The model name under which the sampler serves the base without an adapter."""

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}

State = Literal["starting", "ok", "failed", "stopped"]


class SamplerClient:
    """One sampler. `adapters` are loaded again whenever it is restarted."""

    def __init__(self, base: Path, options: EngineOptions, log_path: Path) -> None:
        self._base = base
        self._options = options
        self._log_path = log_path
        self._child: Child | None = None
        self._client: httpx.AsyncClient | None = None
        self._control: httpx.AsyncClient | None = None  # of its own: questions never wait behind calls
        self._supervisor: asyncio.Task[None] | None = None
        self._adapters: dict[str, Path] = {}
        self._changed = asyncio.Condition()
        self._failed_at = 0.0
        self._wanted = asyncio.Event()
        self.state: State = "stopped"
        self.detail: str | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The child's process id, while it runs."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    @property
    def adapters(self) -> Mapping[str, Path]:
        return self._adapters

    # ---- life

    def start(self) -> None:
        """Begin in the background; `ready` waits for it."""
        self.state = "starting"
        self._supervisor = asyncio.create_task(self._supervise(), name="sampler")

    async def ready(self) -> None:
        """Wait until calls are answered. Raises EngineError with the reason when it cannot be started."""
        if self.state == "failed" and time.monotonic() - self._failed_at > RETRY_SECONDS:
            await self._become("starting")
            self._wanted.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self.state != "starting")
        if self.state != "ok":
            raise EngineError(self.detail or "The sampler is stopped: the server is ending")

    async def stop(self, deadline: float = 10.0) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        await self._become("stopped")
        if self._child is not None:
            await self._child.stop(deadline)
        await self._close_clients()

    def kill(self) -> None:
        """End the child at once, without waiting."""
        if self._child is not None:
            self._child.kill()

    # ---- calls

    async def post(self, payload: Mapping[str, Json]) -> httpx.Response:
        """A whole chat completion, whatever its status. Retried once when the sampler died under it."""
        body = orjson.dumps(payload)
        return await self._with_retry(lambda client: client.post(CHAT, content=body, headers=JSON))

    @asynccontextmanager
    async def stream(self, payload: Mapping[str, Json]) -> AsyncGenerator[httpx.Response]:
        """A streamed chat completion, open at its first bytes. Leaving the context cancels it in the engine."""

        body = orjson.dumps(payload)

        async def opened(client: httpx.AsyncClient) -> httpx.Response:
            return await client.send(client.build_request("POST", CHAT, content=body, headers=JSON), stream=True)

        response = await self._with_retry(opened)
        try:
            yield response
        except httpx.TransportError as error:
            raise EngineError(await self._death(error)) from error
        finally:
            await response.aclose()

    async def load(self, adapter: str, folder: Path) -> None:
        """Load a LoRA folder under a name; again is no fault. Raises EngineError."""
        if adapter in self._adapters:
            return
        body = {"lora_name": adapter, "lora_path": str(folder)}
        response = await self._with_retry(lambda _: self._ask("/v1/load_lora_adapter", body))
        if response.is_error and "already" not in response.text:
            raise EngineError(f"The sampler could not load {adapter} from {folder}: {_reason(response)}")
        self._adapters[adapter] = folder

    async def unload(self, adapter: str) -> None:
        """Forget an adapter. Raises EngineError."""
        if self._adapters.pop(adapter, None) is None:
            return
        body = {"lora_name": adapter}
        response = await self._with_retry(lambda _: self._ask("/v1/unload_lora_adapter", body))
        if response.is_error and response.status_code != 404:
            raise EngineError(f"The sampler could not unload {adapter}: {_reason(response)}")

    # ---- inside

    async def _ask(self, path: str, body: Mapping[str, Json]) -> httpx.Response:
        assert self._control is not None, "ready means that there is a client"
        return await self._control.post(path, json=body)

    async def _close_clients(self) -> None:
        for client in (self._client, self._control):
            if client is not None:
                await client.aclose()

    async def _with_retry(self, send: Callable[[httpx.AsyncClient], Awaitable[R]]) -> R:
        for attempt in (1, 2):
            await self.ready()
            client = self._client
            assert client is not None, "ready means that there is a client"
            try:
                return await send(client)
            except (httpx.TransportError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not client.is_closed:
                    raise
                reason = await self._death(error)
                if attempt == 2:
                    raise EngineError(f"The call was tried twice: {reason}") from error
                log.warning("A call is tried again: %s", reason)
        raise AssertionError("unreachable")

    async def _death(self, error: Exception) -> str:
        """Why a connection broke; gives the supervisor time to notice a death, so that a retry waits for the restart."""
        child = self._child
        if child is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), 2.0)
            if child.returncode is not None:
                if self.state == "ok" and child is self._child:
                    await self._become("starting")
                return f"the sampler ended ({child.ending()}) while the call ran. Its log: {child.log.path}"
        return f"the connection to the sampler broke: {type(error).__name__}: {error}"

    async def _supervise(self) -> None:
        failures = 0
        while True:
            try:
                await self._launch()
            except EngineError as error:
                failures += 1
                if self.restarts:
                    log.error("%s", error)
                if failures < MAX_STARTS and self.restarts:
                    await asyncio.sleep(failures)
                    continue
                await self._give_up(str(error))
                failures = 0
                self.restarts += 1
                continue
            failures = 0
            await self._become("ok")
            await self._until_dead()
            await self._become("starting")
            self.restarts += 1
            assert self._child is not None
            log.error("The sampler ended (%s); starting it again. Log: %s", self._child.ending(), self._log_path)

    async def _give_up(self, reason: str) -> None:
        """Fail waiting calls with the reason, until a later call asks for another try."""
        self._wanted.clear()
        self._failed_at = time.monotonic()
        self.detail = reason
        await self._become("failed")
        await self._wanted.wait()
        self.detail = None

    async def _become(self, state: State) -> None:
        async with self._changed:
            self.state = state
            self._changed.notify_all()

    async def _launch(self) -> None:
        """Start the child, wait for its health, load its adapters again. Raises EngineError with the log's tail."""
        try:
            port = _free_port()
            child = await Child.start(self._argv(port), self._log_path)
        except OSError as error:
            raise EngineError(f"The sampler could not be started: {error}") from error
        self._child = child
        await self._close_clients()
        self._client, self._control = _client(port, 2048), _client(port, 16)
        try:
            await self._await_health(child, self._control)
            for adapter, folder in list(self._adapters.items()):
                await self._reload(self._control, adapter, folder)
        except (EngineError, httpx.TransportError) as error:
            child.kill()
            await child.exited.wait()
            raise EngineError(
                f"The sampler could not be started for {self._base} ({error}). "
                f"The last lines of {child.log.path}:\n{child.log.tail()}"
            ) from error

    async def _await_health(self, child: Child, client: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if child.exited.is_set():
                raise EngineError(f"it ended with {child.ending()}")
            if await _healthy(client):
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), 0.1)
        raise EngineError(f"it gave no sign of life within {START_SECONDS:.0f} s")

    async def _reload(self, client: httpx.AsyncClient, adapter: str, folder: Path) -> None:
        response = await client.post("/v1/load_lora_adapter", json={"lora_name": adapter, "lora_path": str(folder)})
        if response.is_error:
            del self._adapters[adapter]
            log.error("Adapter %s at %s was not loaded again: %s", adapter, folder, _reason(response))

    async def _until_dead(self) -> None:
        """Return when the child has ended; end it when it gives no health for long."""
        assert self._child is not None
        assert self._control is not None
        answered = time.monotonic()
        while not self._child.exited.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._child.exited.wait(), 5.0)
                return
            if await _healthy(self._control):
                answered = time.monotonic()
            elif time.monotonic() - answered > UNHEALTHY_SECONDS:
                log.error("The sampler gave no health for %.0f s and is ended", UNHEALTHY_SECONDS)
                self._child.kill()

    def _argv(self, port: int) -> list[str]:
        options = self._options
        argv = [sys.executable, "-m", SAMPLER_MODULE, "--model", str(self._base), "--served-model-name", SERVED_NAME]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--device", options.device, "--dtype", options.dtype]
        argv += ["--max-batch", str(options.max_batch), "--parent-pid", str(os.getpid())]
        for flag, value in (("--max-model-len", options.max_model_len), ("--threads", options.threads)):
            argv += [flag, str(value)] if value is not None else []
        return argv


def _client(port: int, connections: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=256),
        timeout=httpx.Timeout(connect=10.0, read=None, write=60.0, pool=None),
        trust_env=False,
    )


async def _healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health", timeout=10.0)).status_code == 200
    except httpx.HTTPError:
        return False


def _reason(response: httpx.Response) -> str:
    try:
        return str(json.loads(response.text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}: {response.text[:500]}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
