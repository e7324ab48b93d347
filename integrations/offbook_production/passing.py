"""Passes an app's calls on to its paid model: the bytes of requests and answers as they are, streams as they come.

What passes of them is in `relayed`."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from functools import partial
from urllib.parse import urlsplit

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from offbook.base import clock
from offbook.base.http_access import is_loopback
from offbook.base.types import new_id
from offbook.base.wire import CALL_HEADER, TRAJECTORY_HEADER
from offbook.http_listener.access_checks import CLOSE
from offbook.server.calls.chat_exchange import until_disconnected
from offbook.server.errors import ApiError
from offbook.server.http.model_paths import counts_tokens, found_path, refusal_body
from offbook.server.sampler.pool import Sampler

from .relayed import (
    NO_PAGE,
    RelayedAnswer,
    ended_with_its_connection,
    relayed_headers,
    relayed_path,
    relayed_query,
    secret_of,
)
from .small_answers import SmallAnswer, SmallModel
from .takeover import Takeover
from .threads import thread_of
from .traffic import PassedCall, RouteTraffic

logger = logging.getLogger(__name__)

BELOW = re.compile(r"/r/(?P<route>[^/]+)(?P<path>/.*)", re.DOTALL)
KEPT_BYTES = 4 * 2**20
"""Longest answer that is read after it was passed on."""
CONNECTIONS = 2048
CONNECT_SECONDS, IDLE_SECONDS = 10.0, 4.0
"""Idle connections are closed on this side first: uvicorn, which small providers use, closes them after five seconds."""


class UpstreamGateway:
    """The connections to a paid model, the traffic that went through them, and the takeover by a small model."""

    def __init__(self, traffic: RouteTraffic, takeover: Takeover) -> None:
        """Needs a running event loop."""
        self.traffic = traffic
        self.takeover = takeover
        self._upstream = traffic.upstream
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "user-agent", "content-type"),
            trust_env=not is_loopback(urlsplit(self._upstream.root).hostname or ""),
        )

    async def close(self) -> None:
        """Close the connections, finish reading and recording, and store what is not stored."""
        await self._session.close()
        await self.traffic.close()
        await self.takeover.close()

    async def opened(self, path: str, request: Request) -> PassedCall:
        """A call with its body. Raises ApiError for what is not passed on."""
        traffic, method = self.traffic, request.method
        raw = BELOW.fullmatch(request.scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1"))
        passed = relayed_path(method, path, raw["path"]) if raw is not None and method in ("GET", "POST") else None
        if passed is None:
            raise ApiError(404, f"{method} {path} is not passed on: only calls of a model are", code="not_passed_on")
        query = relayed_query(request.scope["query_string"].decode("latin-1"), self._upstream)
        found = found_path(path) if method == "POST" else None
        body = await request.body()
        call = PassedCall(new_id("call"), None, {}, body, target=self._upstream.url(passed, query))
        if found is None or counts_tokens(found[0]):
            call.counted = False
            return call
        call.path, call.dialect = found[0].groupdict(), found[1]
        with traffic.step("thread"):
            call.thread = thread_of(request.headers, call.request)
        with traffic.step("place"):
            traffic.place(call)
        return call

    async def answer(
        self, call: PassedCall, small: SmallModel, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the answer of the small model if the call is its own and it answers, else of the upstream."""
        answer = None
        if call.counted:
            with self.traffic.step("takeover"):
                answer = await self._small_answer(call, small, path, scope)
        if answer is not None:
            return await self._send_small(call, answer, send)
        await self._pass(call, path, scope, receive, send)

    async def _small_answer(self, call: PassedCall, small: SmallModel, path: str, scope: Scope) -> SmallAnswer | None:
        """The small model's answer if the call is its own and it answers; None: the upstream answers."""
        if not small.chosen(call):
            return None
        answer = await small.answer(call, path, scope)
        self.takeover.add_call(answer.failure)
        if answer.failure is not None:
            return None
        call.small = self.takeover.state.model
        return answer

    async def _send_small(self, call: PassedCall, answer: SmallAnswer, send: Send) -> None:
        call.status, call.answer, call.ended_at = answer.status, [answer.body], clock.end_of(call.started_at)
        headers = [*answer.headers, *_call_headers(call)]
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body, "more_body": False})
        finally:
            with self.traffic.step("note"):
                self.traffic.note(call)

    async def _pass(self, call: PassedCall, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        started, refusal, headers = False, None, list[tuple[bytes, bytes]]()
        try:
            async with self._session.request(
                scope["method"],
                URL(call.target, encoded=True),
                data=io.BytesIO(call.request) if call.request else None,
                headers=relayed_headers(scope["headers"], self._upstream),
                allow_redirects=False,
            ) as response:
                call.status = response.status
                answer = RelayedAnswer(response, secret_of(scope["headers"], self._upstream))
                if answer.unfit is None:
                    started = True
                    with ended_with_its_connection(response):
                        await self._relay(call, answer, response, send)
                else:
                    headers = answer.headers
                    call.status = response.status if 400 <= response.status < 600 else 502
                    refusal = self._refusal(call, f"answered {answer.unfit}", "upstream_answer")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            call.status = 502
            # Not the error's text, which holds parts of the answer, and in its repr the request's headers.
            refusal = self._refusal(call, f"failed: {type(error).__name__}", "upstream_unreachable")
        finally:
            call.ended_at = clock.end_of(call.started_at)
            if call.counted:
                with self.traffic.step("note"):
                    self.traffic.note(call)
        if refusal is not None and started:
            raise IncompleteAnswer
        if refusal is not None:
            shown = JSONResponse(refusal_body(path, refusal), refusal.status)
            shown.raw_headers += headers
            await shown(scope, receive, send)

    def _refusal(self, call: PassedCall, what: str, code: str) -> ApiError:
        """The error of a call that the upstream did not answer, after a line in the log."""
        what = f"the upstream at {urlsplit(self._upstream.root).hostname} {what}"
        logger.warning("route %s: %s", self.traffic.name, what)
        return ApiError(call.status, what, code=code)

    async def _relay(
        self, call: PassedCall, answer: RelayedAnswer, response: aiohttp.ClientResponse, send: Send
    ) -> None:
        headers = [*answer.headers, *answer.body_headers, *_call_headers(call)]
        call.streamed = "content-length" not in response.headers
        size, whole = 0, False
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        while not whole:
            received = await response.content.readany()
            whole = not received
            if call.first_at is None and received:
                call.first_at = clock.end_of(call.started_at)
            piece = answer.mask.push(received) if received else answer.mask.rest()
            size += len(piece)
            if size > KEPT_BYTES:
                call.answer = None
            elif call.answer is not None:
                call.answer.append(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": not whole})


class RouteCalls:
    """ASGI middleware: requests below /r/ROUTE/ go to the upstream, or to the small model."""

    def __init__(self, app: ASGIApp, gateway: UpstreamGateway | None, sampler: Sampler) -> None:
        self._app = app
        self._gateway = gateway
        self._small = None if gateway is None else SmallModel(app, gateway.takeover, sampler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = BELOW.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            return await self._app(scope, receive, send)
        await self._answer(match, scope, receive, partial(_send_no_page, send))

    async def _answer(self, match: re.Match[str], scope: Scope, receive: Receive, send: Send) -> None:
        path, request = match["path"], Request(scope, receive)
        try:
            gateway, small = self._gateway, self._small
            if gateway is None or small is None or gateway.traffic.name != match["route"]:
                known = "none" if gateway is None else repr(gateway.traffic.name)
                raise ApiError(404, f"no route {match['route']!r}: this server has {known}", code="unknown_route")
            call = await gateway.opened(path, request)
        except ApiError as error:
            return await JSONResponse(refusal_body(path, error), error.status)(scope, receive, send)
        passing = asyncio.create_task(gateway.answer(call, small, path, scope, receive, send))
        leaving = asyncio.create_task(until_disconnected(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not passing.done():
                call.cancelled = True
                passing.cancel()
        try:
            await asyncio.gather(passing, return_exceptions=call.cancelled)
        except IncompleteAnswer:
            if (close := scope.get(CLOSE)) is not None:  # without it, the server itself closes what is not complete
                close()
                await until_disconnected(receive)


async def _send_no_page(send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        message["headers"] = [*message.get("headers", ()), *NO_PAGE]
    await send(message)


class IncompleteAnswer(Exception):
    """An answer that broke off after its start: the client's connection has to end, so that it sees that."""


def _call_headers(call: PassedCall) -> list[tuple[bytes, bytes]]:
    if call.trajectory_id is None:
        return []
    return [(CALL_HEADER.encode(), call.id.encode()), (TRAJECTORY_HEADER.encode(), call.trajectory_id.encode())]
