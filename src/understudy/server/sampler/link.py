"""The way to one sampler that may die at any moment."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import httpx

from ...errors import EngineError
from .sampler import SamplerState
from .transport import BROKEN, SERVED_NAME, SamplerConnection

log = logging.getLogger(__name__)
R = TypeVar("R")


class SamplerLink(ABC):
    """Requests wait until the sampler answers, and are sent once more when it died under them."""

    served_name = SERVED_NAME
    """The sampler's own name for the base."""
    has_others = False
    """Whether a request that this sampler cannot answer goes to another one, instead of waiting for it."""

    def __init__(self) -> None:
        self.connection: SamplerConnection | None = None

    @property
    @abstractmethod
    def state(self) -> SamplerState: ...

    @abstractmethod
    async def ready(self) -> None:
        """Wait until the sampler answers. Raises EngineError with the reason when it cannot be had."""

    @abstractmethod
    async def explain(self, error: Exception) -> str:
        """Why a connection broke, in words; returns once `state` is no longer "ok" if the sampler is gone."""

    @abstractmethod
    async def restart(self) -> None:
        """Make the sampler begin anew, where that is in this process's hands."""

    async def send(self, request: Callable[[SamplerConnection], Awaitable[R]]) -> R:
        """The answer to a request. Raises EngineError when there is no sampler, or it died twice under the request."""
        for attempt in (1, 2):
            await self.ready()
            connection = self.connection
            assert connection is not None, "ready means that there is a connection"
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
                log.warning("A call is tried again: %s", reason)
        raise AssertionError("unreachable")

    async def command(self, path: str, body: Mapping[str, str] | None = None) -> httpx.Response:
        """POST to one of the sampler's control routes; the response, whatever its status. Raises EngineError."""
        return await self.send(lambda connection: connection.control.post(path, json=body))
