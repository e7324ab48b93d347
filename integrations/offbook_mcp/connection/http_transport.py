"""The HTTP transports, with the target's headers and authentication, and a limit on response size: streamable HTTP, and HTTP with
SSE of the protocol from 2024, which some servers still have as their only one; and OAuth with client credentials, for a client registered in advance. For interactive sign-in, use the SDK's `OAuthClientProvider`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
from mcp.client._transport import TransportStreams
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from offbook_mcp.errors import McpConnectionError, McpOverflowError

from .connection_state import Link
from .servers import HttpServer, Limits, References, url_secrets

_STREAM_FACTOR = 8
"""An event stream may have this many times `message_bytes`: it carries progress, and stays open for notifications."""


_ENDPOINT_SECONDS = 5.0
"""An SSE server names its endpoint at once. Another server's stream may stay silent."""
_NOT_STREAMABLE = ("HTTP 400", "HTTP 404", "HTTP 405")


def speaks_sse(link: Link) -> bool:
    """Whether a URL that refused streamable HTTP may be one of an SSE server.

    https://modelcontextprotocol.io/specification/2025-06-18/basic/transports#backwards-compatibility"""
    return (link.http_error or "").startswith(_NOT_STREAMABLE)


@asynccontextmanager
async def http_transport(server: HttpServer, link: Link, limits: Limits) -> AsyncGenerator[TransportStreams]:
    """Open the SDK's streams for this URL. Raises ConfigError for a reference that cannot be resolved."""
    url, client = _http_client(server, link, limits, events=False)
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=limits.message_bytes) as streams,
    ):
        yield streams


@asynccontextmanager
async def sse_transport(server: HttpServer, link: Link, limits: Limits) -> AsyncGenerator[TransportStreams]:
    """Open the SDK's streams for the URL of an SSE server. Raises TimeoutError if it names no endpoint in time."""
    url, client = _http_client(server, link, limits, events=True)

    def made(
        headers: dict[str, str] | None = None, timeout: httpx2.Timeout | None = None, auth: httpx2.Auth | None = None
    ) -> httpx2.AsyncClient:
        return client

    async with AsyncExitStack() as stack:
        async with asyncio.timeout(_ENDPOINT_SECONDS):
            streams = await stack.enter_async_context(sse_client(url, httpx_client_factory=made))
        yield streams


def _http_client(server: HttpServer, link: Link, limits: Limits, *, events: bool) -> tuple[str, httpx2.AsyncClient]:
    """The URL with its references resolved, and a client for it. `events`: answers come as events of one long stream, so a
    refused request is never answered."""
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
            if failed and events:
                link.fail(McpConnectionError(server.name, link.http_error or ""))
        response.stream = _BoundedStream(response, link, limits.message_bytes, whole=not events)

    return url, httpx2.AsyncClient(
        headers={**headers, "accept-encoding": "identity"},  # the size of a compressed body bounds nothing
        auth=server.auth,
        timeout=httpx2.Timeout(limits.start_seconds, read=None),  # calls have their own deadlines
        event_hooks={"request": [note_credentials], "response": [watch]},
    )


class _BoundedStream(httpx2.AsyncByteStream):
    """A response body that raises an error beyond the limit, in bytes; without `whole`, beyond that of one event."""

    def __init__(self, response: httpx2.Response, link: Link, limit: int, *, whole: bool) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._stream = response.stream
        self._link = link
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        self._limit = limit * (_STREAM_FACTOR if events and whole else 1)
        self._whole = whole
        self._encoding = response.headers.get("content-encoding", "identity")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._encoding != "identity":
            raise self._failed(f"it compressed a response ({self._encoding}) despite `accept-encoding: identity`")
        size, tail = 0, b""
        async for chunk in self._stream:
            recent = tail + chunk  # the end of an event may come in two chunks
            event_end = -1 if self._whole else max(recent.rfind(b"\n\n"), recent.rfind(b"\r\n\r\n"))
            size = len(recent) - event_end if event_end >= 0 else size + len(chunk)
            tail = chunk[-3:]
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


class MemoryTokens:
    """The SDK's `TokenStorage` in memory: nothing is written to disk."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info


class _WithinTwoOrigins(ClientCredentialsOAuthProvider):
    """The SDK's flow, which reads metadata wherever the server's answer says, such as an address of the local network.

    Here it reads them from the MCP server and the issuer only. The token goes where the issuer's own metadata say.
    """

    def __init__(self, url: str, client_id: str, client_secret: str, scope: str | None, issuer: str) -> None:
        super().__init__(url, MemoryTokens(), client_id, client_secret, scope=scope, issuer=issuer)
        self._origins = {_origin(url), _origin(issuer)}

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Raises OAuthFlowError in place of a request for metadata elsewhere."""
        flow = super().async_auth_flow(request)
        try:
            outgoing = await anext(flow)
            while True:
                if outgoing.method == "GET" and outgoing is not request and _origin(outgoing.url) not in self._origins:
                    raise OAuthFlowError(
                        f"the server's answer names {str(outgoing.url)!r}, which is neither its own origin nor the "
                        f"issuer's ({', '.join(sorted(self._origins))}): nothing was sent there"
                    )
                outgoing = await flow.asend((yield outgoing))
        except StopAsyncIteration:
            return
        finally:
            await flow.aclose()


def _origin(url: str | httpx2.URL) -> str:
    parts = httpx2.URL(url)
    return f"{parts.scheme}://{parts.netloc.decode().rpartition('@')[2]}"


def client_credentials(
    url: str, client_id: str, client_secret: str, *, issuer: str, scopes: Sequence[str] = ()
) -> httpx2.Auth:
    """Authenticate at `url` with a client's id and secret, which are sent to the authorization server `issuer` only.

    Metadata are read from these two origins only. All arguments may contain references such as `${env:SECRET}`. Raises ConfigError for a variable that is not set.
    """
    resolve = References(url).resolve
    scope = " ".join(scopes) or None
    return _WithinTwoOrigins(resolve(url), resolve(client_id), resolve(client_secret), scope, resolve(issuer))


def secrets_of(auth: httpx2.Auth | None) -> tuple[str, ...]:
    """The client's secret and the tokens that an authentication of the SDK has now; none for any other."""
    if not isinstance(auth, OAuthClientProvider):
        return ()
    client, tokens = auth.context.client_info, auth.context.current_tokens
    known = [client.client_secret if client else None]
    known += [tokens.access_token, tokens.refresh_token] if tokens else []
    return tuple(secret for secret in known if secret)
