"""The streamable HTTP transport, with the target's headers and authentication, and a limit on response size."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from offbook_mcp.errors import McpOverflowError

from .connection_state import Link
from .environment_references import References
from .limits import Limits
from .oauth import secrets_of
from .servers import HttpServer, url_secrets

_STREAM_FACTOR = 8
"""An event stream may have this many times `message_bytes`: it carries progress, and stays open for notifications."""


@asynccontextmanager
async def http_transport(server: HttpServer, link: Link, limits: Limits) -> AsyncGenerator[TransportStreams]:
    """Open the SDK's streams for this URL. Raises ConfigError for a reference that cannot be resolved."""
    references = References(server.name, server.workspace)
    url = references.resolve(server.url)
    headers = {name: references.resolve(value, name) for name, value in server.headers.items()}
    for secret in url_secrets(url):
        references.add_secret(secret)
    link.secrets = references.secrets()

    async def note_credentials(request: httpx2.Request) -> None:
        """Mask what authenticates a request: an authentication may get new tokens at any time."""
        for secret in (request.headers.get("authorization", ""), *secrets_of(server.auth)):
            references.add_secret(secret)
        link.secrets = references.secrets()

    async def watch(response: httpx2.Response) -> None:
        if response.request.method == "POST":  # a rejected GET is no error: not every server sends its own events
            failed = response.status_code >= 400
            link.http_error = f"HTTP {response.status_code} {response.reason_phrase}" if failed else None
        response.stream = _BoundedStream(response, link, limits.message_bytes)

    async with (
        httpx2.AsyncClient(
            headers={**headers, "accept-encoding": "identity"},  # the size of a compressed body bounds nothing
            auth=server.auth,
            timeout=httpx2.Timeout(limits.start_seconds, read=None),  # calls have their own deadlines
            event_hooks={"request": [note_credentials], "response": [watch]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=limits.message_bytes) as streams,
    ):
        yield streams


class _BoundedStream(httpx2.AsyncByteStream):
    """A response body that raises an error beyond the limit, in bytes."""

    def __init__(self, response: httpx2.Response, link: Link, limit: int) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._stream = response.stream
        self._link = link
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        self._limit = limit * (_STREAM_FACTOR if events else 1)
        self._encoding = response.headers.get("content-encoding", "identity")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._encoding != "identity":
            raise self._failed(f"it compressed a response ({self._encoding}) despite `accept-encoding: identity`")
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._limit:
                raise self._failed(
                    f"one answer has more than {self._limit:,} bytes; ask for less, or raise message_bytes"
                )
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _failed(self, what: str) -> httpx2.StreamError:
        fault = McpOverflowError(self._link.server, what)
        self._link.fail(fault)
        return httpx2.StreamError(str(fault))
