"""A sampler of this server's own: a child that is started, watched, and started again with its adapters."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

from ...errors import ConfigError, EngineError
from ..child_process import Child
from .supervised import SupervisedSampler
from .transport import SERVED_NAME, checked, healthy

log = logging.getLogger(__name__)

START_SECONDS = 1800.0
"""A large base on a slow disk takes minutes, and vLLM compiles; a child that died is noticed at once."""
UNHEALTHY_SECONDS = 60.0


class ChildSampler(SupervisedSampler):
    """It listens on a Unix socket in a folder of its own, which nobody else can open or take."""

    def __init__(self, command: Callable[[Path], list[str]], log_path: Path) -> None:
        """`command` gives what to run for a socket, anew for each start."""
        super().__init__()
        self._command = command
        self._log_path = log_path
        self._child: Child | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="understudy-", ignore_cleanup_errors=True)
        self._starts = 0

    async def stop(self, deadline: float = 10.0) -> None:
        await super().stop(deadline)
        if self._child is not None:
            await self._child.stop(deadline)
        self._folder.cleanup()

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._folder.cleanup()

    async def explain(self, error: Exception) -> str:
        """Gives the supervisor time to notice a death, so that a retry waits for the restart."""
        child = self._child
        if child is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), 2.0)
            if child.returncode is not None:
                if self._state == "ok" and child is self._child:
                    await self._become("starting")
                return f"the sampler ended ({child.ending()}) while the call ran. Its log: {child.log.path}"
        return await super().explain(error)

    async def restart(self) -> None:
        if self._child is not None:
            self._child.kill()
            await self._child.exited.wait()

    # ---- inside

    async def _launch(self) -> None:
        """Start the child, wait for its health, load its adapters again. Raises EngineError with the log's tail."""
        self._starts += 1
        socket = Path(self._folder.name, str(self._starts))
        try:
            child = await Child.start(await asyncio.to_thread(self._command, socket), self._log_path)
        except (OSError, ConfigError) as error:
            raise EngineError(f"The sampler could not be started: {error}") from error
        self._child = child
        await self._disconnect()
        control = self._connect("http://sampler", socket=socket).control
        try:
            await self._await_health(child, control)
            await checked(control, SERVED_NAME)
            await self.adapters.reload(control)
        except (EngineError, httpx.HTTPError) as error:
            child.kill()
            await child.exited.wait()
            raise EngineError(
                f"The sampler could not be started ({error}). The last lines of {child.log.path}:\n{child.log.tail()}"
            ) from error

    async def _await_health(self, child: Child, client: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < deadline:
                if child.exited.is_set():
                    raise EngineError(f"it ended with {child.ending()}")
                if await healthy(client):
                    return
                self._detail = child.log.tail(1)
                with suppress(TimeoutError):
                    await asyncio.wait_for(child.exited.wait(), 0.1)
        finally:
            self._detail = None
        raise EngineError(f"it gave no sign of life within {START_SECONDS:.0f} s")

    async def _until_dead(self) -> str:
        """It is ended when it gives no health for long."""
        child, connection = self._child, self.connection
        assert child is not None and connection is not None, "launched before"
        answered = time.monotonic()
        while not child.exited.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), 5.0)
                break
            if await healthy(connection.control):
                answered = time.monotonic()
            elif time.monotonic() - answered > UNHEALTHY_SECONDS:
                log.error("The sampler gave no health for %.0f s and is ended", UNHEALTHY_SECONDS)
                child.kill()
        return f"The sampler ended ({child.ending()}); starting it again. Log: {self._log_path}"
