"""Chat completions of one sampler, in vLLM's HTTP dialect."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Literal

import aiohttp
import httpx
import orjson

from ...errors import EngineError
from ...types import Json
from .answer_limits import MAX_ANSWER
from .link import SamplerLink
from .transport import SERVED_NAME, CallClient, Reply, SamplerConnection, read, reason_of

logger = logging.getLogger(__name__)


class SamplerClient:
    """Sends calls to one sampler. A call is retried once if the sampler dies while it runs."""

    def __init__(self, link: SamplerLink) -> None:
        self._link = link
        self._changed = asyncio.Condition()
        self._awake = True
        self._in_flight = 0
        self._queued = (0.0, 0.0)

    @property
    def in_flight(self) -> int:
        """Number of calls that have not been answered completely."""
        return self._in_flight

    async def post(self, payload: Mapping[str, Json], limit: int = MAX_ANSWER) -> Reply:
        """Send a chat completion and return the whole answer; see `SamplerCalls.post`."""
        body = self._body(payload)

        async def whole(connection: SamplerConnection) -> Reply:
            client = connection.calls
            response = await client.open(body)
            try:
                return Reply(response.status, await read(response, limit))
            finally:
                client.done(response)

        async with self._turn():
            return await self._link.send(whole)

    @asynccontextmanager
    async def stream(self, payload: Mapping[str, Json]) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Open a streamed chat completion; see `SamplerCalls.stream`."""
        body = self._body(payload)

        async def opened(connection: SamplerConnection) -> tuple[CallClient, aiohttp.ClientResponse]:
            return connection.calls, await connection.calls.open(body)

        async with self._turn():
            client, response = await self._link.send(opened)
            try:
                yield response
            except aiohttp.ClientError as error:
                raise EngineError(await self._link.explain(error)) from error
            finally:
                client.done(response)

    @asynccontextmanager
    async def asleep(self, *, keep_weights: bool = False) -> AsyncGenerator[None]:
        """Free the GPU inside the block; see `SamplerCalls.asleep`."""
        await self._link.ready()
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

    async def queue_seconds(self) -> float | None:
        """Mean time in vLLM's queue since the last reading; see `SamplerCalls.queue_seconds`."""
        connection = self._link.connection
        if self._link.state != "ok" or connection is None:
            return None
        try:
            text = (await connection.control.get("/metrics", timeout=10.0)).text
        except (httpx.HTTPError, RuntimeError) as error:  # the sampler has died meanwhile
            logger.debug("The sampler's queue time cannot be read: %s", error)
            return None
        seconds, calls = _queue_time(text, "sum"), _queue_time(text, "count")
        before, self._queued = self._queued, (seconds, calls)
        if calls < before[1]:
            before = (0.0, 0.0)  # restarted since then: its counters began at 0
        return (seconds - before[0]) / (calls - before[1]) if calls > before[1] else None

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
            await self._link.restart()

    async def _command(self, path: str) -> None:
        response = await self._link.command(path)
        if response.is_error:
            raise EngineError(f"The sampler refused {path}: {reason_of(response)}")

    def _body(self, payload: Mapping[str, Json]) -> bytes:
        if payload["model"] == SERVED_NAME != self._link.served_name:
            payload = {**payload, "model": self._link.served_name}
        return orjson.dumps(payload)


def _queue_time(text: str, what: Literal["sum", "count"]) -> float:
    """The sum (seconds) or the count of vLLM's histogram of queue times, over all of its engines."""
    return sum(float(value) for value in re.findall(rf"^vllm:request_queue_time_seconds_{what}\S* (\S+)$", text, re.M))
