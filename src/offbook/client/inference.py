"""OpenAI clients of an Offbook server. The server is resolved per request, and requests name their trajectory."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import httpx
from openai import AsyncOpenAI

from offbook.base.errors import CaptureError, OffbookError, ServerError
from offbook.base.types import (
    Json,
)
from offbook.base.wire import (
    CALL_HEADER,
    IDEMPOTENCY_HEADER,
    LENGTH_HEADER,
    RECORD_HEADER,
    TRAJECTORY_HEADER,
)

from .connection.http import Api, unreachable
from .rollouts.capture import (
    call_answered,
    capture_of_calls,
    check_answer,
    completion_limit,
    forced_temperature,
    replayed,
)

PLACE = "http://model.offbook.invalid"
"""Placeholder for the server's address, replaced when a request is sent."""
LENGTHS = ("max_completion_tokens", "max_tokens")
"""Request fields that limit the completion, in tokens."""
TIMEOUT = httpx.Timeout(1800.0, connect=30.0)
"""Seconds; a model call may take long."""
REMEMBERED = 10_000
"""How many of a client's newest calls are remembered, to notice that an answer comes again."""


def openai_client(find: Callable[[], Awaitable[Api]], url: str | None = None) -> AsyncOpenAI:
    """Create an AsyncOpenAI for the server that `find` returns, usable from any event loop.

    It never retries, since a retry records one more generation. `url` becomes `client.base_url`.
    """
    shown = url or PLACE
    http = httpx_client(LabellingTransport(find, shown))
    return AsyncOpenAI(base_url=f"{shown}/v1", api_key="set-when-sent", max_retries=0, http_client=http)


def httpx_client(transport: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
    """Create the HTTP client for the OpenAI SDK, with a timeout for long model calls."""
    return httpx.AsyncClient(transport=transport, timeout=TIMEOUT)


class LabellingTransport(httpx.AsyncBaseTransport):
    """HTTP transport that redirects requests for the base URL `shown` to the current server.

    It replaces the address and the key, and adds the header that names the call's trajectory.
    """

    def __init__(self, find: Callable[[], Awaitable[Api]], shown: str) -> None:
        self._find = find
        self._root = httpx.URL(shown).raw_path.rstrip(b"/")
        self._answered: dict[str, None] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request. A failure to connect becomes an error response, since the SDK hides the text of exceptions."""
        try:
            api = await self._find()
        except OffbookError as error:
            return _error_response(request, error)
        sent = await self._rewritten(request, api)
        label(sent, api)
        sent.extensions["timeout"] = {**sent.extensions.get("timeout", {}), "connect": api.connect_seconds}
        try:
            answer = await api.transport.handle_async_request(sent)
            api.answered = True
            try:
                self._note(sent, answer)
            except CaptureError as error:
                await answer.aclose()
                return _error_response(request, error, 409)
            return answer
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            try:
                api.alive()
            except OffbookError as ended:
                return _error_response(request, ended)
            return _error_response(request, unreachable(api.url, error))

    def _note(self, sent: httpx.Request, answer: httpx.Response) -> None:
        """Note the recorded call. Raises CaptureError for an answer that was given before, to this request or another."""
        call_id = answer.headers.get(CALL_HEADER)
        if call_id is None:
            return
        requested = sent.headers.get(TRAJECTORY_HEADER)
        if "/r/" not in sent.url.path:  # a route's calls have trajectories of its own
            check_answer(requested, unquote(answer.headers.get(TRAJECTORY_HEADER, requested or "")) or None, call_id)
        if IDEMPOTENCY_HEADER not in sent.headers:
            if call_id in self._answered:
                raise replayed(f"the answer of call {call_id} came a second time")
            self._answered[call_id] = None
            if len(self._answered) > REMEMBERED:
                del self._answered[next(iter(self._answered))]
        call_answered(requested or "", call_id)

    async def _rewritten(self, request: httpx.Request, api: Api) -> httpx.Request:
        home = httpx.URL(api.url)
        path = home.raw_path.rstrip(b"/") + request.url.raw_path.removeprefix(self._root)
        headers = httpx.Headers([(name, value) for name, value in request.headers.raw if name.lower() != b"host"])
        headers["authorization"] = f"Bearer {api.key or 'none'}"
        content = await request.aread()
        temperature, limit = forced_temperature(), completion_limit()
        if (temperature, limit) != (None, None) and request.url.path.endswith("/chat/completions"):
            body: Json = json.loads(content)
            if temperature is not None:
                body["temperature"] = temperature
            if limit is not None and _longest(body, limit) > limit:
                body = {name: value for name, value in body.items() if name not in LENGTHS}
                body["max_completion_tokens"] = limit
                headers[LENGTH_HEADER] = "fit"
            content = json.dumps(body).encode()
        del headers["content-length"]
        url = home.copy_with(raw_path=path)
        return httpx.Request(request.method, url, headers=headers, content=content, extensions=request.extensions)


def label(request: httpx.Request, api: Api) -> None:
    """Add the header with the active capture's trajectory. Outside a capture, ask for a new trajectory for this call."""
    if TRAJECTORY_HEADER in request.headers:
        return
    capture = capture_of_calls()
    if capture is not None:
        capture.sent_through(api)
        request.headers[TRAJECTORY_HEADER] = capture.trajectory.id
    else:
        request.headers[RECORD_HEADER] = "1"


def _longest(body: Json, limit: int) -> int:
    """The request's own limit in tokens; `limit + 1` if it sets none."""
    lengths = [body[name] for name in LENGTHS if isinstance(body.get(name), int)]
    return min(lengths, default=limit + 1)


def _error_response(request: httpx.Request, error: OffbookError, status: int = 503) -> httpx.Response:
    status = error.status if isinstance(error, ServerError) else status
    fault = {
        "message": str(error),
        "type": type(error).__name__,
        "param": None,
        "code": "unreachable" if status >= 500 else "replayed",
    }
    return httpx.Response(status, json={"error": fault}, request=request)
