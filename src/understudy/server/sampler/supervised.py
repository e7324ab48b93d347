"""One sampler with a supervisor, which starts it, watches it, and starts it again with its adapters."""

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
from .transport import SamplerConnection, error_text

logger = logging.getLogger(__name__)

RETRY_SECONDS = 15.0
"""A call that arrives this long after a failed start triggers another start. Earlier calls get the error."""


class SupervisedSampler(SamplerLink):
    """A supervised sampler. Subclasses start it (`_launch`) and watch it (`_until_dead`): `child.py`, `running.py`."""

    max_starts = 3
    """Failed starts in a row after which waiting calls get the error."""

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
        """The state. `ready` waits while it is "starting"."""
        return self._state

    @property
    def detail(self) -> str | None:
        """Why the sampler failed, or the progress of its start."""
        return self._detail

    @property
    def restarts(self) -> int:
        """How often it was started again, after a death or a failed start."""
        return self._restarts

    def start(self) -> None:
        """Start the supervisor, which starts the sampler. Needs a running event loop."""
        self._state = "starting"
        self._supervisor = asyncio.create_task(self._supervise(), name="sampler")

    async def ready(self) -> None:
        """Wait until calls are answered. Raises EngineError with the reason of a failed start."""
        if self._state == "failed" and time.monotonic() - self._failed_at > RETRY_SECONDS:
            await self._become("starting")
            self._wanted.set()
        if self._state == "starting":
            async with self._changed:
                await self._changed.wait_for(lambda: self._state != "starting")
        if self._state != "ok":
            raise EngineError(self._detail or "The sampler is stopped: the server is shutting down")

    async def stop(self, deadline: float = 10.0) -> None:
        """Stop the supervisor and close the connection; subclasses stop their process within `deadline` seconds."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        await self._become("stopped")
        await self._disconnect()

    def kill(self) -> None:
        """Kill the sampler if it is a child of this process; here, do nothing."""

    async def explain(self, error: Exception) -> str:
        """Why a call's connection broke. Subclasses also find out whether the sampler is gone."""
        return f"the connection to the sampler broke: {error_text(error)}"

    async def restart(self) -> None:
        """Restart the sampler if it is a child of this process; here, do nothing."""

    async def _launch(self) -> None:
        """Start or reach the sampler, and load its adapters. Raises EngineError."""
        raise NotImplementedError

    async def _until_dead(self) -> str:
        """Return the reason when the sampler no longer answers."""
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

    async def _supervise(self) -> None:
        """Keep the sampler answering until cancelled."""
        failures = 0
        while True:
            try:
                await self._launch()
            except (
                Exception
            ) as error:  # waiting calls must get an error; an unexpected one is logged with its traceback
                known = isinstance(error, EngineError)
                reason = str(error) if known else f"The sampler could not be started: {type(error).__name__}: {error}"
                failures += 1
                if self._restarts or not known:
                    logger.error("%s", reason, exc_info=None if known else error)
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
            logger.error("%s", ending)

    async def _give_up(self, reason: str) -> None:
        """Let waiting calls fail with the reason. Returns when a later call triggers another start."""
        self._wanted.clear()
        self._failed_at = time.monotonic()
        self._detail = reason
        await self._become("failed")
        await self._wanted.wait()
        self._detail = None
