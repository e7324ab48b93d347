"""OpenAI clients of our endpoint: found at the time of the call, labelled with the trajectory that owns it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import httpx
from openai import AsyncOpenAI

from ..errors import ServerError, UnderstudyError
from ..types import Json
from ..wire import CALL_HEADER, LENGTH_HEADER, RECORD_HEADER, TRAJECTORY_HEADER
from .capture import active_capture, call_answered
from .http import Api, unreachable
from .sampling import completion_limit, forced_temperature

PLACE = "http://model.understudy.invalid"
"""Stands for the server in requests; replaced by its address when they are sent."""
LENGTHS = ("max_completion_tokens", "max_tokens")
"""The fields of a request that limit its completion."""
TIMEOUT = httpx.Timeout(1800.0, connect=30.0)


def openai_client(find: Callable[[], Awaitable[Api]], url: str | None = None) -> AsyncOpenAI:
    """A plain AsyncOpenAI for the server that `find` gives, usable from any event loop.

    It never retries: a retry would be one more generation. `url` is what `client.base_url` shows.
    """
    shown = url or PLACE
    http = httpx_client(LabellingTransport(find, shown))
    return AsyncOpenAI(base_url=f"{shown}/v1", api_key="set-when-sent", max_retries=0, http_client=http)


def httpx_client(transport: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
    """An HTTP client for the SDK; a model call may take long."""
    return httpx.AsyncClient(transport=transport, timeout=TIMEOUT)


class LabellingTransport(httpx.AsyncBaseTransport):
    """Sends to the server of the moment what was addressed to `shown`: its address, its key, and whose call this is."""

    def __init__(self, find: Callable[[], Awaitable[Api]], shown: str) -> None:
        self._find = find
        self._root = httpx.URL(shown).raw_path.rstrip(b"/")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The server's answer; what prevents one is an answer too, since the SDK would hide an exception's text."""
        try:
            api = await self._find()
        except UnderstudyError as error:
            return _refusal(request, error)
        sent = await self._rewritten(request, api)
        label(sent, api)
        sent.extensions["timeout"] = {**sent.extensions.get("timeout", {}), "connect": api.connect_seconds}
        try:
            answer = await api.transport.handle_async_request(sent)
            api.answered = True
            if call_id := answer.headers.get(CALL_HEADER):
                call_answered(sent.headers.get(TRAJECTORY_HEADER, ""), call_id)
            return answer
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            try:
                api.alive()
            except UnderstudyError as gone:
                return _refusal(request, gone)
            return _refusal(request, unreachable(api.url, error))

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
    """Name the trajectory that owns the call, or ask for it to be recorded under one of its own."""
    if TRAJECTORY_HEADER in request.headers:
        return
    capture = active_capture()
    if capture is not None:
        capture.sent_through(api)
        request.headers[TRAJECTORY_HEADER] = capture.trajectory.id
    else:
        request.headers[RECORD_HEADER] = "1"


def _longest(body: Json, limit: int) -> int:
    """The limit that a request sets itself; above `limit` where it sets none."""
    lengths = [body[name] for name in LENGTHS if isinstance(body.get(name), int)]
    return min(lengths, default=limit + 1)


def _refusal(request: httpx.Request, error: UnderstudyError) -> httpx.Response:
    status = error.status if isinstance(error, ServerError) else 503
    fault = {"message": str(error), "type": type(error).__name__, "param": None, "code": "unreachable"}
    return httpx.Response(status, json={"error": fault}, request=request)
