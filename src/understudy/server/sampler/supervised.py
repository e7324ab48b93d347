"""One sampler that is kept answering: brought up, watched, and brought up again with its adapters."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path

from ...errors import EngineError
from .adapters import LoadedAdapters
from .client import SamplerClient
from .link import SamplerLink
from .sampler import SamplerState
from .transport import SamplerConnection, broken

log = logging.getLogger(__name__)

RETRY_SECONDS = 15.0
"""After that many seconds a sampler that could not be reached is tried again, when a call needs it."""


class SupervisedSampler(SamplerLink):
    """Subclasses bring it up (`_launch`) and watch it (`_until_dead`): `child.py`, `running.py`."""

    max_starts = 3
    """Starts in a row that may fail before waiting calls fail with the reason."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = SamplerClient(self)
        self.adapters = LoadedAdapters(self)
        self._supervisor: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._failed_at = 0.0
        self._state: SamplerState = "stopped"
        self._detail: str | None = None
        self._restarts = 0

    @property
    def state(self) -> SamplerState:
        return self._state

    @property
    def detail(self) -> str | None:
        return self._detail

    @property
    def restarts(self) -> int:
        return self._restarts

    def start(self) -> None:
        self._state = "starting"
        self._supervisor = asyncio.create_task(self._supervise(), name="sampler")

    async def ready(self) -> None:
        if self._state == "failed" and time.monotonic() - self._failed_at > RETRY_SECONDS:
            await self._become("starting")
            self._wanted.set()
        if self._state == "starting":
            async with self._changed:
                await self._changed.wait_for(lambda: self._state != "starting")
        if self._state != "ok":
            raise EngineError(self._detail or "The sampler is stopped: the server is ending")

    async def stop(self, deadline: float = 10.0) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        await self._become("stopped")
        await self._disconnect()

    def kill(self) -> None:
        """A sampler that is no child of this process has nothing to end."""

    async def explain(self, error: Exception) -> str:
        return f"the connection to the sampler broke: {broken(error)}"

    async def restart(self) -> None:
        """A sampler that is not in this process's hands stays as it is."""

    # ---- for subclasses

    async def _launch(self) -> None:
        """Make it answer, its adapters loaded. Raises EngineError."""
        raise NotImplementedError

    async def _until_dead(self) -> str:
        """Returns when it answers no more, and says why."""
        raise NotImplementedError

    def _connect(self, url: str, *, socket: Path | None = None, key: str | None = None) -> SamplerConnection:
        self.connection = SamplerConnection(url, socket=socket, key=key)
        return self.connection

    async def _disconnect(self) -> None:
        if self.connection is not None:
            await self.connection.close()

    async def _become(self, state: SamplerState) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()

    # ---- the supervisor

    async def _supervise(self) -> None:
        failures = 0
        while True:
            try:
                await self._launch()
            except Exception as error:  # whoever waits must hear of it; one that is not foreseen is logged whole
                known = isinstance(error, EngineError)
                reason = str(error) if known else f"The sampler could not be started: {type(error).__name__}: {error}"
                failures += 1
                if self._restarts or not known:
                    log.error("%s", reason, exc_info=None if known else error)
                if failures < self.max_starts and self._restarts:
                    await asyncio.sleep(failures)
                    continue
                await self._give_up(reason)
                failures = 0
                self._restarts += 1
                continue
            failures = 0
            await self._become("ok")
            ending = await self._until_dead()
            await self._become("starting")
            self._restarts += 1
            log.error("%s", ending)

    async def _give_up(self, reason: str) -> None:
        """Fail waiting calls with the reason, until a later call asks for another try."""
        self._wanted.clear()
        self._failed_at = time.monotonic()
        self._detail = reason
        await self._become("failed")
        await self._wanted.wait()
        self._detail = None
