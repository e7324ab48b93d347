"""The HTTP application: routes, who may call, how large a body may be, and one shape for every error."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from contextlib import suppress

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import understudy

from ...errors import UnderstudyError
from ...wire import Health
from ..errors import ApiError, internal_error, refused, shortened
from ..pages.site import add_pages
from ..pages.source import DashboardSource, EngineState
from ..services import Services, ServicesDep
from . import cross_site, openai_api, resampling, training_api, trajectory_api
from .auth import SIGN_IN, SIGN_OUT, Guard
from .bounded_protocol import ADMIT
from .openapi import add_openapi
from .sign_in import LARGEST_FORM, add_sign_in, is_page, to_sign_in

DISCARD_SECONDS = 10.0
"""How long the rest of a body that is too large is read and thrown away."""

log = logging.getLogger(__name__)


def build(services: Services, guard: Guard) -> FastAPI:
    """The application over services that are open; whoever opened them closes them."""
    app = FastAPI(title="Understudy", version=understudy.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    routers = (openai_api.router, trajectory_api.router, trajectory_api.traces, training_api.router, resampling.router)
    for router in routers:
        app.include_router(router)
    add_pages(app, DashboardSource(services.store, services.options.dir, lambda: engine_state(services)))
    app.add_api_route("/health", health, methods=["GET"])
    add_sign_in(app, guard)
    add_openapi(app)
    add_error_answers(app)
    app.add_middleware(openai_api.Chats, services=services)
    origins = services.options.allow_origin
    app.add_middleware(Gate, guard=guard, max_body=services.options.max_body, origins=frozenset(origins))
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(LastResort)
    return app


def add_error_answers(app: FastAPI) -> None:
    """One shape for every error."""
    app.add_exception_handler(UnderstudyError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(OSError, _refuse_disk)


async def health(services: ServicesDep) -> Health:
    """`ok` once the sampler answers; `detail` says why not."""
    state = services.sampler.state
    status = "ok" if state == "ok" else "starting" if state == "starting" else "failed"
    return Health(
        status=status,
        version=understudy.__version__,
        base_model=services.base.name,
        engine=services.engine.name,
        pid=os.getpid(),
        detail=services.sampler.detail,
        in_flight=services.sampler.calls.in_flight,
        restarts=services.sampler.restarts,
        loop_lag=services.lag.p99(),
        wrong_answers=services.recorder.wrong_answers,
        learner=services.learner.facts if services.learner is not None else {},
    )


def engine_state(services: Services) -> EngineState:
    """What the dashboard says of the running engine."""
    learner = services.learner
    facts = [learner.state, *(f"{name} {value}" for name, value in learner.facts.items())] if learner else ["off"]
    return EngineState(
        version=understudy.__version__,
        base_model=services.base.name,
        engine=services.engine.described(),
        sampler=services.sampler.state,
        learner=", ".join(facts),
        training=services.training.running,
    )


class LastResort:
    """Answers for a defect of ours; the traceback is in the log, its kind in the answer.

    Starlette's own handler for any exception raises it again after its answer, whereupon uvicorn closes the connection
    under the client's next request. Only half an answer is left to that: nothing else tells that it is not whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begun, whole = False, False

        async def noted(message: Message) -> None:
            nonlocal begun, whole
            begun = True
            whole = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if begun and not whole:
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not begun:
                await internal_error(error).response()(scope, receive, send)


class Gate:
    """Before any route: the key or the Host header, the page that a browser acts for, and the body's size."""

    def __init__(self, app: ASGIApp, guard: Guard, max_body: int, origins: frozenset[str]) -> None:
        self._app = app
        self._guard = guard
        self._max_body = max_body
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        decided = self._guard.decide(path, headers, method)
        form = path in (SIGN_IN, SIGN_OUT)
        refusal = decided if isinstance(decided, tuple) else None
        refusal = refusal or cross_site.refusal(method, headers, self._origins, form=form)
        if refusal is not None:
            status, code, message = refusal
            if status == 401 and is_page(method, path, headers):
                return await to_sign_in(scope)(scope, receive, send)
            return await ApiError(status, message, code=code).response()(scope, receive, send)
        scope.setdefault("state", {})["access"] = decided
        if decided is not None and (admit := scope.get(ADMIT)) is not None:
            admit()
        largest = self._max_body if decided is not None else min(self._max_body, LARGEST_FORM)
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > largest:
            return await self._refuse_large(scope, receive, send, largest)
        return await self._bounded(scope, receive, send, largest)

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, largest: int) -> None:
        """Count the body as it comes; past the limit the refusal is the answer, whatever the route makes of it."""
        seen, answering, sending = 0, False, True

        async def counted() -> Message:
            nonlocal seen, sending
            message = await receive()
            sending = bool(message.get("more_body"))
            seen += len(message.get("body", b"")) if message["type"] == "http.request" else 0
            if seen > largest:
                raise _too_large(largest)
            return message

        async def answer(message: Message) -> None:
            nonlocal answering
            if answering or seen <= largest:
                answering = True
                await send(message)

        try:
            await self._app(scope, counted, answer)
        except Exception:  # what a route makes of a body that is cut off is of no interest
            if answering or seen <= largest:
                raise
        if not answering and seen > largest:
            await self._refuse_large(scope, receive, send, largest, sending=sending)

    async def _refuse_large(
        self, scope: Scope, receive: Receive, send: Send, largest: int, *, sending: bool = True
    ) -> None:
        """Reads on for a while first: a client that is still sending would see a reset connection, not the refusal."""
        left = 4 * largest if sending else 0
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0:
                    message = await receive()
                    if not message.get("more_body"):
                        break
                    left -= len(message["body"])
        await _too_large(largest).response({"connection": "close"})(scope, receive, send)


def _too_large(largest: int) -> ApiError:
    return ApiError(
        413, f"The request body is larger than {largest} bytes; raise the server's --max-body", code="body_too_large"
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, UnderstudyError)
    return refused(error, f"{request.method} {request.url.path}")


async def _refuse_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    lines: list[str] = []
    params: list[str] = []
    for fault in error.errors():
        place = [str(part) for part in fault["loc"]]
        field = ".".join(place[1:] if place[0] in ("body", "query", "path") else place) or "body"
        params.append(field)
        if fault["type"] == "json_invalid":
            lines.append(f"The body is no JSON: {fault.get('ctx', {}).get('error', fault['msg'])}")
        else:
            lines.append(f"{field}: {fault['msg']} (got {shortened(fault.get('input'))})")
    return ApiError(400, "\n".join(lines), params[0], "invalid_value").response()


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message = f"There is no {request.method} {request.url.path} here"
        if request.url.path.endswith("/v1/responses"):
            message += ": only the Chat Completions API is served. Let the client use that one (/v1/chat/completions)"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path}"
    else:
        message = str(error.detail)
    return ApiError(error.status_code, message).response(error.headers)


async def _refuse_disk(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    log.error("%s %s: %s", request.method, request.url.path, error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, f"No space left on the server's disk: {error}", code="disk_full").response()
    return ApiError(500, f"The server could not read or write a file: {error}", code="file_error").response()
