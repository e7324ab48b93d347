"""The streamable-HTTP transport: headers and authentication of the target, and answers of bounded size."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client

from ..errors import McpOverflowError
from ..tools.references import References
from .limits import Limits
from .link import Link
from .servers import HttpServer

_STREAM_FACTOR = 8
"""An event stream may be this many messages long: it carries progress, and stays open to tell of changes."""


@asynccontextmanager
async def http_transport(server: HttpServer, link: Link, limits: Limits) -> AsyncGenerator[TransportStreams]:
    """The streams of a connection to this URL. Raises ConfigError for a reference that cannot be resolved."""
    references = References(server.name, server.workspace)
    url = references.resolve(server.url)
    headers = {name: references.resolve(value, name) for name, value in server.headers.items()}
    link.secrets = references.secrets()

    async def watch(response: httpx2.Response) -> None:
        if response.request.method == "POST":  # a GET may be refused: not every server sends events of its own
            failed = response.status_code >= 400
            link.http_error = f"HTTP {response.status_code} {response.reason_phrase}" if failed else None
        response.stream = _Bounded(response, link, limits.message_bytes)

    async with (
        httpx2.AsyncClient(
            headers={**headers, "accept-encoding": "identity"},  # a compressed body is not bounded by its size
            auth=server.auth,
            timeout=httpx2.Timeout(limits.start_seconds, read=None),  # calls have deadlines of their own
            event_hooks={"response": [watch]},
        ) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=limits.message_bytes) as streams,
    ):
        yield streams


class _Bounded(httpx2.AsyncByteStream):
    """A body that ends with an error beyond the limit."""

    def __init__(self, response: httpx2.Response, link: Link, limit: int) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._stream = response.stream
        self._link = link
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        self._limit = limit * (_STREAM_FACTOR if events else 1)
        self._encoding = response.headers.get("content-encoding", "identity")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._encoding != "identity":
            raise self._refused(f"it compressed an answer ({self._encoding}) although asked not to")
        size = 0
        async for chunk in self._stream:
            size += len(chunk)
            if size > self._limit:
                raise self._refused(
                    f"one answer has more than {self._limit:,} bytes; ask for less, or raise message_bytes"
                )
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _refused(self, what: str) -> httpx2.StreamError:
        fault = McpOverflowError(self._link.server, what)
        self._link.fail(fault)
        return httpx2.StreamError(str(fault))
