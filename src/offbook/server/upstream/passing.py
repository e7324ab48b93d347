"""Passes an app's calls on to its paid model: the bytes of requests and answers as they are, streams as they come."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from urllib.parse import urlsplit

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from offbook.base import clock
from offbook.base.http_access import KEY_HEADERS, is_loopback
from offbook.base.types import new_id
from offbook.base.wire import CALL_HEADER, TRAJECTORY_HEADER

from ..calls.chat_exchange import until_disconnected
from ..errors import ApiError
from ..http.model_paths import found_path, refusal_body
from ..takeover.small_answers import SmallAnswer, SmallModel
from ..takeover.takeover import Takeover
from .address import AUTHORIZATION, UpstreamModel
from .app_routes import CHAT, AppRoute, AppRoutes
from .threads import thread_of
from .traffic import PassedCall, RouteTraffic

logger = logging.getLogger(__name__)

BELOW = re.compile(r"/r/(?P<route>[^/]+)(?P<path>/.*)")
_READ = re.compile(r"/(v1|v1beta)/models(/.*)?|/v1/responses/.+")
"""Paths that may be read. Others of a provider, such as its files, are no business of an app's model."""
_ALSO = re.compile(r"/v1/embeddings")
"""Paths to which an app that has one address posts too. They pass, and are not counted."""
_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "accept-encoding", "cookie", "expect"}
)
"""Headers of one connection (RFC 9110, section 7.6.1), and those that this server writes or keeps to itself."""
KEPT_BYTES = 4 * 2**20
"""Longest answer that is read after it was passed on."""
CONNECTIONS = 2048
CONNECT_SECONDS, IDLE_SECONDS = 10.0, 4.0
"""Idle connections are closed on this side first: uvicorn, which small providers use, closes them after five seconds."""


class UpstreamGateway:
    """The connections to a paid model, the traffic that went through them, and the takeover by a small model."""

    def __init__(self, traffic: RouteTraffic, takeover: Takeover) -> None:
        """Needs a running event loop, and `traffic` with an upstream."""
        assert traffic.upstream is not None
        self.upstream: UpstreamModel = traffic.upstream
        self.traffic = traffic
        self.takeover = takeover
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "user-agent", "content-type"),
            trust_env=not is_loopback(urlsplit(self.upstream.root).hostname or ""),
        )

    async def close(self) -> None:
        """Close the connections, then finish reading and recording."""
        await self.session.close()
        await self.traffic.close()
        await self.takeover.close()


class RouteCalls:
    """ASGI middleware: requests below /r/ROUTE/ go to the upstream, or on a route without one to the small model."""

    def __init__(self, app: ASGIApp, gateway: UpstreamGateway | None, app_routes: AppRoutes) -> None:
        self._app = app
        self._gateway = None if gateway is None else UpstreamCalls(app, gateway)
        self._app_routes = app_routes
        app_routes.below = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = BELOW.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            return await self._app(scope, receive, send)
        path, request = match["path"], Request(scope, receive)
        try:
            if self._gateway is not None and self._gateway.name == match["route"]:
                call = await self._gateway.opened(path, request)
                answering = self._gateway.answer(call, path, scope, receive, send)
            else:
                route = self._route(match["route"])
                call = await _opened_chat(route, path, request)
                answering = _answer_chat(route, call, scope, receive, send)
        except ApiError as error:
            return await JSONResponse(refusal_body(path, error), error.status)(scope, receive, send)
        passing = asyncio.create_task(answering)
        leaving = asyncio.create_task(until_disconnected(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not passing.done():
                call.cancelled = True
                passing.cancel()
        await asyncio.gather(passing, return_exceptions=call.cancelled)

    def _route(self, name: str) -> AppRoute:
        if (route := self._app_routes.get(name)) is not None:
            return route
        known = ", ".join(repr(route) for route in route_names(self._gateway and self._gateway.name, self._app_routes))
        raise ApiError(404, f"no route {name!r}: this server has {known or 'none'}", code="unknown_route")


async def _opened_chat(route: AppRoute, path: str, request: Request) -> PassedCall:
    if request.method != "POST" or path != CHAT:
        raise ApiError(
            404,
            f"{request.method} {path}: the app asks its own models; here are chat completions",
            code="not_passed_on",
        )
    body = await request.body()
    call = PassedCall(new_id("call"), None, {}, body, thread=thread_of(request.headers, body))
    route.traffic.place(call)
    return call


async def _answer_chat(route: AppRoute, call: PassedCall, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        answer = await route.answer(call, scope)
    except ApiError as error:
        return await JSONResponse(error.body(), error.status)(scope, receive, send)
    await send_small(route.traffic, call, answer, send)


class UpstreamCalls:
    """The calls of the gateway's route. They need neither the sampler nor the records."""

    def __init__(self, app: ASGIApp, gateway: UpstreamGateway) -> None:
        self._gateway = gateway
        self._upstream = gateway.upstream
        self._small = SmallModel(app, gateway.takeover, gateway.traffic.recorded)

    @property
    def name(self) -> str:
        """The name of the route."""
        return self._gateway.traffic.name

    async def opened(self, path: str, request: Request) -> PassedCall:
        """A call with its body. Raises ApiError for what is not passed on."""
        traffic, method = self._gateway.traffic, request.method
        found = found_path(path) if method == "POST" else None
        passes = found is not None or (_ALSO if method == "POST" else _READ).fullmatch(path)
        if not passes or method not in ("GET", "POST"):
            raise ApiError(404, f"{method} {path} is not passed on: only calls of a model are", code="not_passed_on")
        body = await request.body()
        call = PassedCall(new_id("call"), None, {}, body)
        if found is None:
            call.counted = False
            return call
        call.path, call.dialect = found[0].groupdict(), found[1]
        call.thread = thread_of(request.headers, body)
        traffic.place(call)
        return call

    async def answer(self, call: PassedCall, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer of the small model if the call is its own and it answers, else of the upstream."""
        if not call.counted or not self._small.takeover.active:
            return await self._pass(call, path, scope, receive, send)
        stage = self._small.takeover.stage
        if self._small.chosen(call, path):
            answer = await self._small.answer(call, path, scope)
            seconds = clock.end_of(call.started_at) - call.started_at
            call.on_cost = stage.add_small_cost
            if answer.failure is None:
                call.small = (self._small.takeover.state.model, self._small.price)
            stage.add_call(seconds, answer.failure)
            self._small.takeover.decide()
            if answer.failure is None:
                return await send_small(self._gateway.traffic, call, answer, send)
        else:
            call.on_cost = stage.add_paid_cost
        await self._pass(call, path, scope, receive, send)
        self._small.shadow(call, path, scope)

    async def _pass(self, call: PassedCall, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            upstream = self._upstream
            query = scope["query_string"].decode("latin-1")
            if upstream.key is not None:
                query = "&".join(part for part in query.split("&") if not part.startswith("key="))
            raw = scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1")
            where = BELOW.fullmatch(raw)  # as the client wrote it: a model's name may have an escaped slash
            url = URL(upstream.url(where["path"] if where is not None else path, query), encoded=True)
            async with self._gateway.session.request(
                scope["method"],
                url,
                data=io.BytesIO(call.request) if call.request else None,
                headers=self._headers(scope),
                allow_redirects=False,
            ) as response:
                call.status = response.status
                started = True
                await self._relay(call, response, send)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            call.status = 502
            logger.warning("route %s: the upstream failed: %r", self._gateway.traffic.name, error)
            if started:  # the client must see that the answer is incomplete: its connection ends
                raise ConnectionError(f"the upstream broke off in the middle of an answer: {error!r}") from error
            refusal = ApiError(502, f"the upstream could not be reached: {error!r}", code="upstream_unreachable")
            await JSONResponse(refusal_body(path, refusal), 502)(scope, receive, send)
        finally:
            call.ended_at = clock.end_of(call.started_at)
            if call.counted:
                self._gateway.traffic.note(call)

    def _headers(self, scope: Scope) -> list[tuple[str, str]]:
        upstream = self._upstream
        hidden = _HOP if upstream.key is None else _HOP | {AUTHORIZATION, *KEY_HEADERS}
        headers = [
            (name, value.decode("latin-1"))
            for raw, value in scope["headers"]
            if (name := raw.decode("latin-1").lower()) not in hidden and not name.startswith("x-offbook-")
        ]
        if upstream.key is not None:
            headers.append((upstream.key_header, upstream.key))
        return [*headers, ("accept-encoding", "identity")]

    async def _relay(self, call: PassedCall, response: aiohttp.ClientResponse, send: Send) -> None:
        headers = [
            (name.lower(), value)
            for name, value in response.raw_headers
            if name.lower() == b"content-length" or name.decode("latin-1").lower() not in _HOP
        ]
        headers += _call_headers(call)
        call.streamed = "content-length" not in response.headers
        size = 0
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        while piece := await response.content.readany():
            if call.first_at is None:
                call.first_at = clock.end_of(call.started_at)
            size += len(piece)
            if size > KEPT_BYTES:
                call.answer = None
            elif call.answer is not None:
                call.answer.append(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_small(traffic: RouteTraffic, call: PassedCall, answer: SmallAnswer, send: Send) -> None:
    """Send what the small model answered."""
    call.status, call.answer, call.ended_at = answer.status, [answer.body], clock.end_of(call.started_at)
    headers = [*answer.headers, *_call_headers(call)]
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})
    finally:
        traffic.note(call)


def route_names(gateway: str | None, app_routes: AppRoutes) -> list[str]:
    """The names of a server's routes: first the gateway's."""
    return [*([gateway] if gateway is not None else []), *sorted(route.traffic.name for route in app_routes)]


def _call_headers(call: PassedCall) -> list[tuple[bytes, bytes]]:
    if call.trajectory_id is None:
        return []
    return [(CALL_HEADER.encode(), call.id.encode()), (TRAJECTORY_HEADER.encode(), call.trajectory_id.encode())]
