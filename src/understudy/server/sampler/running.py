"""vLLM servers that run already: one, or several that share the calls."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import httpx

from ...errors import ConfigError, EngineError
from ...types import Json
from .client import SamplerClient, State
from .transport import Reply, broken, checked, healthy, reason_of

log = logging.getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
CONNECT_SECONDS = 60.0
"""How long calls wait for a vLLM that does not answer, before they fail with the reason."""
ASK_SECONDS = 2.0
MISSES = 3
"""Health checks in a row without an answer after which one is gone; one is enough where a call's connection broke too."""
_NAME_SECONDS = 10.0


def key() -> str | None:
    """The key of running vLLM servers. Raises ConfigError for what cannot be sent."""
    text = os.environ.get(KEY_VARIABLE, "").strip()
    if not (text.isascii() and text.isprintable()):
        raise ConfigError(f"{KEY_VARIABLE}: a key has printable ASCII characters only")
    return text or None


class RunningSampler(SamplerClient):
    """A vLLM at `url`, whose key is in VLLM_API_KEY. It reads adapters from this machine's folders: same disk, same path."""

    max_starts = 1

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self._gone = asyncio.Event()

    # ---- inside

    async def _launch(self) -> None:
        control = self._control or self._connect(self.url, key=key())  # kept: calls may be running
        deadline = time.monotonic() + CONNECT_SECONDS
        while not await healthy(control):
            if time.monotonic() > deadline:
                raise EngineError(f"vLLM at {self.url} did not answer GET /health for {CONNECT_SECONDS:.0f} s")
            self._detail = f"vLLM at {self.url} does not answer yet"
            await asyncio.sleep(ASK_SECONDS)
        self._detail = None
        try:
            self.served_name = await self._base_name(control)
            await checked(control, self.served_name)
            await self._reload()
        except (EngineError, httpx.HTTPError) as error:
            raise EngineError(f"vLLM at {self.url} cannot be used: {str(error) or type(error).__name__}") from error

    async def _base_name(self, client: httpx.AsyncClient) -> str:
        response = await client.get("/v1/models", timeout=_NAME_SECONDS)
        if response.status_code == 401:
            raise EngineError(
                f"it refuses the key in {KEY_VARIABLE}" if key() else f"it wants a key: set {KEY_VARIABLE}"
            )
        if response.is_error:
            raise EngineError(f"GET /v1/models: {reason_of(response)}")
        try:
            base = next(model for model in response.json()["data"] if model.get("parent") is None)
            name, root = str(base["id"]), base.get("root")
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise EngineError(f"GET /v1/models names no base model: {response.text[:200]!r}") from error
        log.info("vLLM at %s serves %s (%s)", self.url, name, root)
        return name

    async def _until_dead(self) -> str:
        assert self._control is not None, "launched before"
        self._gone.clear()
        misses = 0
        while misses < MISSES:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), ASK_SECONDS)
                break
            misses = 0 if await healthy(self._control) else misses + 1
        return f"vLLM at {self.url} answers no more; waiting for it"

    async def _death(self, error: Exception) -> str:
        """One that gives no health either is gone: the supervisor is told, so that a retry waits for it."""
        if self._state == "ok" and (self._control is None or not await healthy(self._control)):
            self._gone.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._state != "ok")
        return f"vLLM at {self.url} broke the connection: {broken(error)}"


class SamplerPool(SamplerClient):
    """Several samplers as one: each call goes to the one with the fewest, adapters to all."""

    def __init__(self, members: Sequence[SamplerClient]) -> None:
        super().__init__()
        self._members = members
        for member in members:
            member.has_others = True

    @property
    def state(self) -> State:
        states = {member.state for member in self._members}
        return next(state for state in ("ok", "starting", "failed", "stopped") if state in states)

    @property
    def detail(self) -> str | None:
        return "\n".join(member.detail for member in self._members if member.detail) or None

    @property
    def restarts(self) -> int:
        return sum(member.restarts for member in self._members)

    @property
    def in_flight(self) -> int:
        return sum(member.in_flight for member in self._members)

    def start(self) -> None:
        for member in self._members:
            member.start()

    async def ready(self) -> None:
        """Wait until one answers calls. Raises EngineError with the reasons when none can be had."""
        waiting = {asyncio.create_task(member.ready()) for member in self._members}
        reasons: list[str] = []
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is None:
                        return
                    reasons.append(str(error))
        finally:
            for task in waiting:
                task.cancel()
        raise EngineError("\n".join(reasons))

    async def stop(self, deadline: float = 10.0) -> None:
        await asyncio.gather(*(member.stop(deadline) for member in self._members))

    async def post(self, payload: Mapping[str, Json]) -> Reply:
        for others in range(len(self._members) - 1, -1, -1):
            member = await self._next()
            try:
                return await member.post(payload)
            except EngineError:
                if member.state == "ok" or not others:
                    raise
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def stream(self, payload: Mapping[str, Json]) -> AsyncGenerator[aiohttp.ClientResponse]:
        for others in range(len(self._members) - 1, -1, -1):
            member = await self._next()
            async with AsyncExitStack() as stack:
                try:
                    response = await stack.enter_async_context(member.stream(payload))
                except EngineError:
                    if member.state == "ok" or not others:
                        raise
                    continue
                yield response
                return

    async def load(self, adapter: str, folder: Path) -> None:
        """Into each that is there; the others load it when they are. Raises EngineError."""
        await self.ready()
        present = [member for member in self._members if member.state == "ok"]
        await asyncio.gather(*(member.load(adapter, folder) for member in present))
        for member in self._members:
            member.expect(adapter, folder)
        self._adapters[adapter] = folder

    async def unload(self, adapter: str) -> None:
        """From each that is there; the others do not get it again. Raises EngineError."""
        self.forget(adapter)
        present = [member for member in self._members if member.state == "ok"]
        for member in self._members:
            if member not in present:
                member.forget(adapter)
        await asyncio.gather(*(member.unload(adapter) for member in present))

    async def queue_seconds(self) -> float | None:
        answers = await asyncio.gather(*(member.queue_seconds() for member in self._members if member.state == "ok"))
        known = [answer for answer in answers if answer is not None]
        return sum(known) / len(known) if known else None

    async def _next(self) -> SamplerClient:
        await self.ready()
        present = [member for member in self._members if member.state == "ok"]
        return min(present or self._members, key=lambda member: member.in_flight)
