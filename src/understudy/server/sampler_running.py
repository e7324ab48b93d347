"""vLLM servers that run already: one, or several that share the calls."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx

from ..errors import EngineError
from ..types import Json
from .sampler import SamplerClient, State
from .sampler_http import Reply, checked, healthy

log = logging.getLogger(__name__)

KEY_VARIABLE = "VLLM_API_KEY"
CONNECT_SECONDS = 60.0
"""How long calls wait for a vLLM that does not answer, before they fail with the reason."""
ASK_SECONDS = 2.0


class RunningSampler(SamplerClient):
    """A vLLM at `url`, whose key is in VLLM_API_KEY. It reads adapters from this machine's folders: same disk, same path."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url.rstrip("/").removesuffix("/v1")

    # ---- inside

    async def _launch(self) -> None:
        await self._close_clients()
        control = self._connect(self.url, key=os.environ.get(KEY_VARIABLE))
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
        except (EngineError, httpx.TransportError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"vLLM at {self.url} cannot be used: {error}") from error

    async def _base_name(self, client: httpx.AsyncClient) -> str:
        response = await client.get("/v1/models")
        if response.status_code == 401:
            raise EngineError(f"it wants a key: set {KEY_VARIABLE}")
        bases = [model for model in response.json()["data"] if model.get("parent") is None]
        log.info("vLLM at %s serves %s (%s)", self.url, bases[0]["id"], bases[0].get("root"))
        return str(bases[0]["id"])

    async def _until_dead(self) -> str:
        assert self._control is not None, "launched before"
        while await healthy(self._control):
            await asyncio.sleep(ASK_SECONDS)
        return f"vLLM at {self.url} answers no more; waiting for it"

    async def _death(self, error: Exception) -> str:
        if self._state == "ok" and (self._control is None or not await healthy(self._control)):
            await self._become("starting")
        return f"vLLM at {self.url} broke the connection: {type(error).__name__}: {error}"


class SamplerPool(SamplerClient):
    """Several samplers as one: each call goes to the one with the fewest, adapters to all."""

    def __init__(self, members: Sequence[SamplerClient]) -> None:
        super().__init__()
        self._members = members

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
        async with (await self._next()).stream(payload) as response:
            yield response

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
