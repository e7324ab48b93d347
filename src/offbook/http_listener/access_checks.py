"""The checks of every request before any route: key or Host header, cross-site requests, and the body's size."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any, cast
from urllib.parse import parse_qsl

from offbook.base.errors import ServerError
from offbook.base.http_access import KEY_HEADERS, OPEN_PATHS, Refusal, cross_site_refusal, key_refusal
from offbook.openai_dialect.chat_answer import error_body, kind_of

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application. The types are here so that a listener needs no web framework."""
Decide = Callable[[str, Mapping[str, str], str], object]
"""From a path, its headers and method to the rejection (a `Refusal`), None for what is open to everybody, or the access."""
Written = Callable[[str, Refusal], object]
"""From a path and the rejection of a request to the body of the response."""

_GOOGLE = re.compile(r"/v1(?:alpha|beta)?/models/")
"""Paths of Google's API, where a key may come as `?key=`."""
ADMIT = "offbook.admit"
"""Key of the ASGI scope. Its value is a function that the application calls once a request may pass."""
CLOSE = "offbook.close"
"""Key of the ASGI scope. Its value is a function that closes the connection in the middle of a response."""
OPEN_BODY = 10_000
"""Most bytes of a body that a stranger may send to an open path."""
CHALLENGE = {"www-authenticate": 'Basic realm="Offbook: the key is the password", charset="UTF-8"'}
"""Headers of a 401 (RFC 7617): a browser asks for the key, and sends it with each request to this server."""
DISCARD_SECONDS = 10.0
"""How long the rest of a body that is too large is read and discarded."""


def single_key(key: str | None) -> Decide:
    """The decision of a listener with one key, or with none on loopback."""

    def decide(path: str, headers: Mapping[str, str], _: str) -> Refusal | bool | None:
        return key_refusal(key, path, headers) or (None if key is not None and path in OPEN_PATHS else True)

    return decide


def openai_error(path: str, refusal: Refusal) -> object:
    """The body of an error in OpenAI's format."""
    status, code, message = refusal
    return error_body(message, kind_of(status), code=code)


async def respond(send: Send, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole response: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(content))} | dict(headers or {})
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


class AccessChecks:
    """ASGI middleware that checks the key or Host header, cross-site requests and the body's size before any route."""

    def __init__(
        self,
        app: Application,
        decide: Decide,
        max_body: int,
        *,
        size_option: str = "",
        origins: frozenset[str] | None = None,
        written: Written = openai_error,
    ) -> None:
        """`max_body` is in bytes; `size_option` is the command line's option for it. Origins of `origins` may do everything;
        None: the server has no option for them. `written`: the form of errors.
        """
        self._app = app
        self._decide = decide
        self._max_body = max_body
        self._hint = f"; raise the server's {size_option}" if size_option else ""
        self._origins = origins
        self._written = written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        # Starlette's Headers scan the whole list at every access. Of a repeated header, the first one counts there and here.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        path, method = scope["path"], scope["method"]
        if not any(name in headers for name in ("authorization", *KEY_HEADERS)) and _GOOGLE.search(path):
            query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            headers |= {"x-goog-api-key": query["key"]} if "key" in query else {}
        decided = self._decide(path, headers, method)
        refusal = cast(Refusal, decided) if isinstance(decided, tuple) else None
        refusal = refusal or cross_site_refusal(method, headers, self._origins)
        if refusal is not None:
            asks = CHALLENGE if refusal[0] == 401 else {}
            return await respond(send, refusal[0], self._written(path, refusal), asks)
        scope.setdefault("state", {})["access"] = decided
        if decided is not None and (admit := scope.get(ADMIT)) is not None:
            admit()
        largest = self._max_body if decided is not None else min(self._max_body, OPEN_BODY)
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > largest):
            return await self._refuse_large(path, receive, send, largest)
        return await self._bounded(scope, receive, send, largest)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, largest: int) -> None:
        """Count the body's bytes as they arrive. Beyond the limit, answer 413 whatever the route returns or raises."""
        received, responding, client_sending = 0, False, True

        async def counted_receive() -> Message:
            nonlocal received, client_sending
            message = await receive()
            client_sending = bool(message.get("more_body"))
            received += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if received > largest:
                raise ServerError(f"The request body is larger than {largest} bytes", status=413)
            return message

        async def checked_send(message: Message) -> None:
            nonlocal responding
            if responding or received <= largest:
                responding = True
                await send(message)

        try:
            await self._app(scope, counted_receive, checked_send)
        except Exception:  # the route's reaction to a truncated body does not matter
            if responding or received <= largest:
                raise
        if not responding and received > largest:
            await self._refuse_large(scope["path"], receive, send, largest, sending=client_sending)

    async def _refuse_large(
        self, path: str, receive: Receive, send: Send, largest: int, *, sending: bool = True
    ) -> None:
        """Answer 413 after reading on for a while: a client that is still sending would only see a reset connection."""
        left = 4 * largest if sending else 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0:
                    message = await receive()
                    if not message.get("more_body"):
                        break
                    left -= len(message["body"])
        refusal = (413, "body_too_large", f"The request body is larger than {largest} bytes{self._hint}")
        await respond(send, 413, self._written(path, refusal), {"connection": "close"})
