"""The limit of concurrent requests to one endpoint; litellm has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary


class EndpointSlots:
    """Requests in flight to one endpoint, in one event loop. Everyone who waits brings a limit."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._waiting: list[asyncio.Event] = []

    @asynccontextmanager
    async def slot(self, limit: int) -> AsyncGenerator[None]:
        """Wait until fewer than `limit` are in flight, and be one of them."""
        while self._in_flight >= limit:
            turn = asyncio.Event()
            self._waiting.append(turn)
            await turn.wait()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            waiting, self._waiting = self._waiting, []
            for turn in waiting:  # limits differ, so all look again
                turn.set()


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, EndpointSlots]] = WeakKeyDictionary()


def slots_of(endpoint: str) -> EndpointSlots:
    """The slots of an endpoint in the running loop."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault(endpoint, EndpointSlots())
