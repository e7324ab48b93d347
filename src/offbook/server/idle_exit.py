"""The end of a server that has nothing to do: for a machine that costs money while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from offbook.base.http_access import READING


class Activity:
    """When the server last worked. A request works unless it only reads: a page that is left open must not count."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._in_flight = 0

    def touch(self) -> None:
        """Something works now."""
        self._last = time.monotonic()

    def begin(self) -> None:
        """A request begins."""
        self._in_flight += 1

    def end(self) -> None:
        """It has ended."""
        self._in_flight -= 1
        self.touch()

    def idle_seconds(self) -> float:
        """Seconds since the last work; 0 while a request runs."""
        return 0.0 if self._in_flight else time.monotonic() - self._last


class CountedRequests:
    """ASGI middleware that notes the requests of `activity`; downloads of archives count too."""

    def __init__(self, app: ASGIApp, activity: Activity) -> None:
        self._app = app
        self._activity = activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] in READING and "/archives/" not in scope["path"]):
            return await self._app(scope, receive, send)
        self._activity.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._activity.end()


async def wait_idle(activity: Activity, seconds: float, works: Callable[[], bool]) -> None:
    """Return when nothing has worked for `seconds`. `works`: whether the server starts or trains, which counts as work."""
    while True:
        if works():
            activity.touch()
        left = seconds - activity.idle_seconds()
        if left <= 0:
            return
        await asyncio.sleep(min(left, 1.0))
