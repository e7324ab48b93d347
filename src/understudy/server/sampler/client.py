"""Calls to one sampler, in vLLM's HTTP dialect."""

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

log = logging.getLogger(__name__)


class SamplerClient:
    """Chat completions of one sampler. A call is retried once when the sampler died under it."""

    def __init__(self, link: SamplerLink) -> None:
        self._link = link
        self._changed = asyncio.Condition()
        self._awake = True
        self._in_flight = 0
        self._queued = (0.0, 0.0)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    async def post(self, payload: Mapping[str, Json], limit: int = MAX_ANSWER) -> Reply:
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
    async def asleep(self) -> AsyncGenerator[None]:
        await self._link.ready()
        async with self._changed:
            self._awake = False
            await self._changed.wait_for(lambda: not self._in_flight)
        try:
            await self._command("/sleep?level=1&mode=wait")
            try:
                yield
            finally:
                await self._wake()
        finally:
            async with self._changed:
                self._awake = True
                self._changed.notify_all()

    async def queue_seconds(self) -> float | None:
        connection = self._link.connection
        if self._link.state != "ok" or connection is None:
            return None
        try:
            text = (await connection.control.get("/metrics", timeout=10.0)).text
        except (httpx.HTTPError, RuntimeError) as error:  # it ended meanwhile
            log.debug("no queue time: %s", error)
            return None
        spent, calls = _counted(text, "sum"), _counted(text, "count")
        before, self._queued = self._queued, (spent, calls)
        if calls < before[1]:
            before = (0.0, 0.0)  # it was restarted
        return (spent - before[0]) / (calls - before[1]) if calls > before[1] else None

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

    async def _wake(self) -> None:
        """What ran while it slept is done and must not fail now: a sampler that does not wake begins anew."""
        try:
            await self._command("/wake_up")
        except EngineError as error:
            log.error("The sampler did not wake and is started again: %s", error)
            await self._link.restart()

    async def _command(self, path: str) -> None:
        response = await self._link.command(path)
        if response.is_error:
            raise EngineError(f"The sampler refused {path}: {reason_of(response)}")

    def _body(self, payload: Mapping[str, Json]) -> bytes:
        if payload["model"] == SERVED_NAME != self._link.served_name:
            payload = {**payload, "model": self._link.served_name}
        return orjson.dumps(payload)


def _counted(text: str, what: Literal["sum", "count"]) -> float:
    """The sum over all engines of vLLM's histogram of queue times."""
    return sum(float(value) for value in re.findall(rf"^vllm:request_queue_time_seconds_{what}\S* (\S+)$", text, re.M))
