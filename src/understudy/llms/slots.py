"""Limits the concurrent requests to one endpoint, which litellm does not do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary


class EndpointSlots:
    """The requests in flight to one endpoint in one event loop. Callers may have different limits."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._waiting: list[asyncio.Event] = []

    @asynccontextmanager
    async def slot(self, limit: int) -> AsyncGenerator[None]:
        """Wait until fewer than `limit` requests are in flight, and count one inside the block."""
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
            for turn in waiting:  # limits differ, so all of them check again
                turn.set()


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, EndpointSlots]] = WeakKeyDictionary()


def slots_of(endpoint: str) -> EndpointSlots:
    """The slots of an endpoint in the running event loop."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault(endpoint, EndpointSlots())
