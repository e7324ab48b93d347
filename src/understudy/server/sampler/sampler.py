"""What the server uses of a sampler, whether it is one process or several."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

import aiohttp

from ...types import Json
from .answer_limits import MAX_ANSWER
from .transport import Reply

SamplerState = Literal["starting", "ok", "failed", "stopped"]


class SamplerCalls(Protocol):
    """Chat completions, and the pause that keeps them off the GPU."""

    @property
    def in_flight(self) -> int:
        """Calls that are being answered."""
        ...

    async def post(self, payload: Mapping[str, Json], limit: int = MAX_ANSWER) -> Reply:
        """A whole chat completion of at most `limit` bytes, whatever its status. Raises EngineError."""
        ...

    def stream(self, payload: Mapping[str, Json]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A streamed chat completion, open at its first bytes. Leaving the context cancels it. Raises EngineError."""
        ...

    def asleep(self) -> AbstractAsyncContextManager[None]:
        """The block has the GPU to itself: calls in flight end first, those that arrive wait. Raises EngineError."""
        ...

    async def queue_seconds(self) -> float | None:
        """How long a call waited for its turn in the engine, on average since the last question; None when none did, or
        the engine does not count it."""
        ...


class SamplerAdapters(Protocol):
    """The LoRA adapters of a sampler, by the names under which calls ask for them."""

    @property
    def loaded(self) -> Collection[str]: ...

    async def load(self, adapter: str, folder: Path) -> None:
        """Load a LoRA folder under a name; again is no fault. Raises EngineError."""
        ...

    async def unload(self, adapter: str) -> None:
        """Forget an adapter; an unknown one is no fault. Raises EngineError."""
        ...


class Sampler(Protocol):
    """A sampler's life, with the calls to it and its adapters beside it."""

    @property
    def calls(self) -> SamplerCalls: ...

    @property
    def adapters(self) -> SamplerAdapters: ...

    @property
    def state(self) -> SamplerState: ...

    @property
    def detail(self) -> str | None:
        """Why it does not answer, or how far its start has come."""
        ...

    @property
    def restarts(self) -> int: ...

    def start(self) -> None:
        """Begin in the background; `ready` waits for it."""
        ...

    async def ready(self) -> None:
        """Wait until calls are answered. Raises EngineError with the reason when it cannot be had."""
        ...

    async def stop(self, deadline: float = 10.0) -> None:
        """End what this process began, within `deadline` seconds."""
        ...

    def kill(self) -> None:
        """End it at once, without waiting, where it is a child of this process."""
        ...
