"""A page of the paid model's server in a real browser: it does nothing in the origin of this one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.testing.asgi import Application, Receive, Scope, Send, serving
from tests.fakes.lying_provider import LyingProvider, lying_provider

from .conftest import Opening

pytestmark = pytest.mark.slow("a browser")

ATTACK = "document.title = 'ran'; fetch('/api/takeover/stop', {method: 'POST', body: '{}'})"
PAGES = {
    "text/html": f'<script>{ATTACK}</script><img src=x onerror="{ATTACK}">',
    "image/svg+xml": f'<svg xmlns="http://www.w3.org/2000/svg"><script>{ATTACK}</script></svg>',
    "application/xhtml+xml": f'<html xmlns="http://www.w3.org/1999/xhtml"><script>{ATTACK}</script></html>',
    "text/plain": f"<html><script>{ATTACK}</script></html>",
    "application/json": f"<html><script>{ATTACK}</script></html>",
    "text/event-stream": f"<html><script>{ATTACK}</script></html>",
    "application/problem+json": f"<html><script>{ATTACK}</script></html>",
    "": f"<html><script>{ATTACK}</script></html>",
}
COOKIE = "set-cookie: offbook_session=theirs\r\n"


class Noted:
    """An application, and the paths that it was asked for."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self.asked: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        await self._application(scope, receive, send)


@contextmanager
def hostile(passing: Opening) -> Iterator[tuple[str, LyingProvider, list[str]]]:
    """The URL of a server before a hostile provider, in a loop of its own: Playwright's has the test's thread."""
    ready, over = threading.Event(), threading.Event()
    opened: list[tuple[str, LyingProvider, list[str]]] = []

    async def serve() -> None:
        async with lying_provider() as provider, passing(model=f"openai/x?api_base={provider.url}/v1") as route:
            noted = Noted(app.build(route.services, Guard(None)))
            async with serving(noted) as url:
                opened.append((url, provider, noted.asked))
                ready.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield opened[0]
    finally:
        over.set()
        thread.join(20)


def test_a_page_of_the_provider_runs_no_script_sets_no_cookie_and_leads_nowhere(
    passing: Opening, chromium: Any
) -> None:
    context = chromium.new_context()
    with hostile(passing) as (url, provider, asked):
        page = context.new_page()
        for kind, text in PAGES.items():
            body = text.encode()
            head = f"content-type: {kind}\r\n" if kind else ""
            for status in ("200 OK", "500 No"):
                length = f"{COOKIE}content-length: {len(body)}\r\n\r\n"
                provider.pieces = [f"HTTP/1.1 {status}\r\n{head}{length}".encode() + body]
                page.goto(f"{url}/r/desk/v1/models/x", wait_until="load")
                assert page.title() != "ran", kind
        provider.pieces = [f"HTTP/1.1 302 Found\r\nlocation: {url}/api/routes\r\ncontent-length: 0\r\n\r\n".encode()]
        page.goto(f"{url}/r/desk/v1/models/x", wait_until="load")
        assert page.url.endswith("/r/desk/v1/models/x")
        assert context.cookies() == []
    context.close()
    assert len(provider.heads) >= 2 * len(PAGES) + 1
    assert not [path for path in asked if path.startswith("/api/")]
