"""HTTP transports that live as long as the event loop they are used in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import httpx


@dataclass(frozen=True)
class _Living:
    transport: httpx.AsyncHTTPTransport
    ending: AsyncGenerator[None]


class LoopTransport(httpx.AsyncBaseTransport):
    """One pool of connections per event loop, closed when its loop shuts down.

    A client built on it can be used from several loops, one after the other or at once (a notebook's loop and
    `asyncio.run` in a thread), where a plain one fails with "Event loop is closed".
    """

    def __init__(self, *, secure: bool, max_connections: int | None = None) -> None:
        # Without TLS there is nothing to verify, and loading the certificates takes longer than the first request.
        self._verify = secure
        self._limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=64, keepalive_expiry=30)
        self._of: WeakKeyDictionary[asyncio.AbstractEventLoop, _Living] = WeakKeyDictionary()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over this loop's connections."""
        living = self._of.get(asyncio.get_running_loop()) or await self._open()
        return await living.transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close this loop's connections; those of other loops end with their loops."""
        living = self._of.pop(asyncio.get_running_loop(), None)
        if living is not None:
            await living.ending.aclose()

    async def _open(self) -> _Living:
        loop = asyncio.get_running_loop()
        transport = httpx.AsyncHTTPTransport(verify=self._verify, limits=self._limits)
        living = _Living(transport, self._end_with(loop, transport))
        self._of[loop] = living
        # Once started, the loop knows the generator and closes it in `shutdown_asyncgens`, which `asyncio.run` calls.
        await anext(living.ending)
        for ended in [other for other in list(self._of) if other.is_closed()]:
            self._of.pop(ended, None)
        return living

    async def _end_with(
        self, loop: asyncio.AbstractEventLoop, transport: httpx.AsyncHTTPTransport
    ) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._of.pop(loop, None)
            await transport.aclose()
