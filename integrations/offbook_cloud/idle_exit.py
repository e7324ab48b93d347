"""The end of a server that has nothing to do: for a machine that costs money while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any, ClassVar

from starlette.types import ASGIApp, Receive, Scope, Send

from offbook.base.http_access import READING
from offbook.base.terminal import echo
from offbook.server.wing import ServerDoor, ServerWing

from .options import IdleOptions


class IdleExit(ServerWing):
    """`serve --idle-exit MINUTES`. A request counts unless it only reads: a page that is left open must not. Downloads of
    archives do."""

    name: ClassVar[str] = "stop_when_idle"  # sorts behind the other wings, so its middleware sees what they answer

    def __init__(self, options: IdleOptions, server: ServerDoor) -> None:
        super().__init__(options, server)
        self._last_work = time.monotonic()
        self._in_flight = 0
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    def wanted(cls, options: Any) -> bool:
        """With --idle-exit."""
        return isinstance(options, IdleOptions) and options.idle_exit is not None

    async def open(self) -> None:
        """Begin to watch."""
        self._watch = asyncio.create_task(self._end_when_idle(self.options.idle_exit))

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Count the requests."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or (scope["method"] in READING and "/archives/" not in scope["path"]):
                return await app(scope, receive, send)
            self._in_flight += 1
            try:
                await app(scope, receive, send)
            finally:
                self._in_flight -= 1
                self._last_work = time.monotonic()

        return counted

    async def close(self, deadline: float) -> None:
        """End the watch."""
        if self._watch is not None:
            self._watch.cancel()

    async def _end_when_idle(self, minutes: float) -> None:
        while (left := self._last_work + 60 * minutes - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 1.0))
            if self._in_flight or self.server.sampler.state == "starting" or self.server.training.running is not None:
                self._last_work = time.monotonic()
        echo(f"Nothing to do for {minutes:g} minutes (--idle-exit): the server ends")
        os.kill(os.getpid(), signal.SIGTERM)
