"""Requests to one sampler, with one retry if it dies."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import httpx

from offbook.base.errors import EngineError

from .sampler import SamplerState
from .transport import BROKEN, SERVED_NAME, SamplerConnection

logger = logging.getLogger(__name__)
R = TypeVar("R")
"""Type of an answer."""


class SamplerLink(ABC):
    """Sends requests to one sampler.

    A request waits for the sampler and is sent again once if the connection breaks.
    """

    served_name = SERVED_NAME
    """The sampler's own name for the base."""
    has_others = False
    """Set by a pool with other samplers: when this one is gone, requests fail at once, and the pool resends them."""

    def __init__(self) -> None:
        self.connection: SamplerConnection | None = None

    @property
    @abstractmethod
    def state(self) -> SamplerState:
        """The sampler's state. "ok": it answers."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until the sampler answers. Raises EngineError with the reason if it cannot be started or reached."""

    @abstractmethod
    async def explain(self, error: Exception) -> str:
        """Why a connection broke, in words. If the sampler is gone, `state` is no longer "ok" when this returns."""

    @abstractmethod
    async def restart(self) -> None:
        """Restart the sampler if it is a child of this process; otherwise do nothing."""

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
