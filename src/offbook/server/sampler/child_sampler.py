"""A sampler that runs as a child process of this server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from offbook.base.errors import ConfigError, EngineError
from offbook.base.locked_folders import TemporaryFolder

from ..child_process import Child
from .supervised import SupervisedSampler
from .transport import SERVED_NAME, check_sampling, healthy

logger = logging.getLogger(__name__)

START_SECONDS = 1800.0
"""Limit for a start. Loading a large base from a slow disk takes minutes, and so does vLLM's compilation."""
REFUSED = 2
"""Exit code of a sampler that does not start with these options or this base: the last error in its log says why."""
UNHEALTHY_SECONDS = 60.0
"""A child that answers no health check for so long is killed and started again."""


class ChildSampler(SupervisedSampler):
    """A child that is restarted, with its adapters, when it dies or hangs.

    It listens on a Unix socket in a private folder, so no other account can connect to it or occupy its address.
    """

    def __init__(
        self,
        command: Callable[[Path], list[str]],
        log_path: Path,
        *,
        name: str = "the sampler",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command(socket)` returns the command line that serves on `socket`; it is called for every start. `name` is for
        messages; `environment` is added to this process's."""
        super().__init__()
        self._command = command
        self._log_path = log_path
        self._name = name
        self._environment = environment
        self._child: Child | None = None
        self._folder = TemporaryFolder("sampler")
        self._starts = 0

    async def stop(self, deadline: float = 10.0) -> None:
        """Stop the child: SIGTERM, then SIGKILL after `deadline` seconds. Removes the socket's folder."""
        await super().stop(deadline)
        if self._child is not None:
            await self._child.stop(deadline)
        self._folder.remove()

    def kill(self) -> None:
        """Kill the child without waiting, and remove the socket's folder."""
        if self._child is not None:
            self._child.kill()
        self._folder.remove()

    async def explain(self, error: Exception) -> str:
        """Why a call's connection broke.

        Waits up to two seconds for the child's exit: if it died, the state changes to "starting", so that a retry of
        the call waits for the restart.
        """
        child = self._child
        if child is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), 2.0)
            if child.returncode is not None:
                if self._state == "ok" and child is self._child:
                    await self._become("starting")
                return f"{self._name} ended ({child.ending()}) during the call. Its log: {child.log.path}"
        return await super().explain(error)

    async def restart(self) -> None:
        """Kill the child and wait for its exit. The supervisor starts it again."""
        if self._child is not None:
            self._child.kill()
            await self._child.exited.wait()

    async def _launch(self) -> None:
        await self._disconnect()
        self._starts += 1
        socket = self._folder.path / str(self._starts)
        try:
            argv = await asyncio.to_thread(self._command, socket)
            child = self._child = await Child.start(argv, self._log_path, env=self._environment)
        except (OSError, ConfigError) as error:
            raise EngineError(f"{self._title} could not be started: {error}") from error
        control = self._connect("http://sampler", socket=socket).control
        try:
            await self._await_health(child, control)
            await check_sampling(control, SERVED_NAME)
            await self.adapters.reload(control)
        except (EngineError, httpx.HTTPError) as error:
            child.kill()
            await child.exited.wait()
            if child.returncode == REFUSED:
                raise EngineError(
                    f"{self._title} could not be started: {_refusal(child.log.tail(200))} (log: {child.log.path})"
                ) from error
            raise EngineError(
                f"{self._title} could not be started ({error}). The last lines of {child.log.path}:\n{child.log.tail()}"
            ) from error

    async def _await_health(self, child: Child, client: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < deadline:
                if child.exited.is_set():
                    raise EngineError(f"the process ended with {child.ending()}")
                if await healthy(client):
                    return
                self._detail = child.log.tail().split("\n")[-1]
                with suppress(TimeoutError):
                    await asyncio.wait_for(child.exited.wait(), 0.1)
        finally:
            self._detail = None
        raise EngineError(f"no health check was answered within {START_SECONDS:.0f} s")

    async def _until_dead(self) -> str:
        """Wait for the child's exit; kill it after UNHEALTHY_SECONDS without an answered health check."""
        child, connection = self._child, self.connection
        assert child is not None and connection is not None, "_launch connects"
        last_healthy = time.monotonic()
        while not child.exited.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(child.exited.wait(), 5.0)
                break
            if await healthy(connection.control):
                last_healthy = time.monotonic()
            elif time.monotonic() - last_healthy > UNHEALTHY_SECONDS:
                logger.error("%s answered no health check for %.0f s; killing it", self._title, UNHEALTHY_SECONDS)
                child.kill()
        return f"{self._title} ended ({child.ending()}); restarting it. Log: {self._log_path}"

    @property
    def _title(self) -> str:
        return self._name[0].upper() + self._name[1:]


def _refusal(log: str) -> str:
    """Why the sampler refused: the message of its last error. Libraries may write lines after it while the process ends."""
    lines = log.split("\n")
    errors = (line.partition(" ERROR offbook.sampler: ")[2] for line in reversed(lines))
    return next(filter(None, errors), lines[-1])
