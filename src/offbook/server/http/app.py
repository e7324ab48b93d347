"""The HTTP application: routes, access control, body size limits, and one format for all errors."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import offbook
from offbook.base.errors import OffbookError
from offbook.base.http_access import Refusal
from offbook.base.wire import Health
from offbook.http_listener.access_checks import AccessChecks

from ..errors import ApiError, internal_error, refusal_of, shortened
from ..services import Services, ServicesDep
from . import openai_api, training_api
from .auth import Guard
from .model_paths import refusal_body
from .openapi import add_openapi

logger = logging.getLogger(__name__)

_OTHER_MODELS = re.compile(r"/v1/(embeddings|moderations|images|audio)\b|:(?:batchE|e)mbedContents?$")
"""Paths of APIs of other kinds of models."""


def build(services: Services, guard: Guard) -> FastAPI:
    """Build the application on open services. The caller closes them."""
    app = FastAPI(title="Offbook", version=offbook.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    for router in (openai_api.router, training_api.router):
        app.router.routes.extend(router.routes)  # include_router would make each route anew, 0.1 s for all
    for wing in services.wings.values():
        app.router.routes.extend(wing.router.routes if wing.router is not None else ())
        wing.add_to(app)
    app.add_api_route("/health", health, methods=["GET"])
    add_openapi(app)
    add_error_answers(app)
    app.add_middleware(openai_api.ModelCalls, services=services)
    for wing in services.wings.values():
        app.add_middleware(wing.middleware)
    origins = services.options.allow_origin

    add_access_checks(app, guard, services.options.max_body, frozenset(origins))
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(UnexpectedErrors)
    return app


def add_access_checks(
    app: FastAPI,
    guard: Guard,
    max_body: int,
    origins: frozenset[str] = frozenset(),
) -> None:
    """Check every request before the routes that are added so far."""
    app.add_middleware(
        AccessChecks,
        decide=guard.decide,
        max_body=max_body,
        size_option="--max-body",
        origins=origins,
        written=_written,
    )


def _written(path: str, refusal: Refusal) -> object:
    """The body of a rejection, in the form of the API at the path."""
    status, code, message = refusal
    return refusal_body(path, ApiError(status, message, code=code))


def add_error_answers(app: FastAPI) -> None:
    """Register handlers that convert every error to OpenAI's error format."""
    app.add_exception_handler(OffbookError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(OSError, _refuse_disk)


async def health(services: ServicesDep) -> Health:
    """The server's state: `ok` once the sampler answers, else `detail` says why not."""
    state = services.sampler.state
    status = "ok" if state == "ok" else "starting" if state == "starting" else "failed"
    return Health(
        status=status,
        version=offbook.__version__,
        base_model=services.base.name,
        engine=services.engine.name,
        pid=os.getpid(),
        detail=services.sampler.detail,
        in_flight=services.sampler.calls.in_flight,
        restarts=services.sampler.restarts,
        wrong_answers=services.recorder.wrong_answers,
        learner=services.learner.facts if services.learner is not None else {},
    )


class UnexpectedErrors:
    """ASGI middleware that answers 500 to an unexpected exception, and logs its traceback. A client that disconnects within
    its body is no error: it is one line of the log.

    Starlette's own handler re-raises the exception after its response, so uvicorn closes the connection during the client's
    next request. Only a response that has begun is left to that: a closed connection tells the client that it is incomplete.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, complete = False, False

        async def tracked_send(message: Message) -> None:
            nonlocal started, complete
            started = True
            complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, tracked_send)
        except ClientDisconnect:
            logger.info(
                "%s %s: the client disconnected before the request was complete", scope["method"], scope["path"]
            )
        except Exception as error:
            if started and not complete:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await internal_error(error).response()(scope, receive, send)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, OffbookError)
    return _answer(request, refusal_of(error, f"{request.method} {request.url.path}"))


def _answer(request: Request, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The error, in the form of the API at the request's path."""
    return JSONResponse(refusal_body(request.url.path, error), error.status, headers)


async def _refuse_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    lines: list[str] = []
    params: list[str] = []
    for fault in error.errors():
        location = [str(part) for part in fault["loc"]]
        field = ".".join(location[1:] if location[0] in ("body", "query", "path") else location) or "body"
        params.append(field)
        if fault["type"] == "json_invalid":
            lines.append(f"The body is not JSON: {fault.get('ctx', {}).get('error', fault['msg'])}")
        else:
            lines.append(f"{field}: {fault['msg']} (got {shortened(fault.get('input'))})")
    return _answer(request, ApiError(400, "\n".join(lines), params[0], "invalid_value"))


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    missing = f"There is no {request.method} {request.url.path} here"
    other = _OTHER_MODELS.search(request.url.path)
    if other is not None and error.status_code in (404, 405):  # 405: some look like the name of a model, to be read
        message = f"{missing}: {other[1] or 'embeddings'} are not what a language model answers. Let the client use another server for them"
        return _answer(request, ApiError(404, message))
    if error.status_code == 404:
        message = missing
    elif error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path}"
    else:
        message = str(error.detail)
    return _answer(request, ApiError(error.status_code, message), error.headers)


async def _refuse_disk(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    logger.error("%s %s: %s", request.method, request.url.path, error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ApiError(507, f"No space left on the server's disk: {error}", code="disk_full").response()
    return ApiError(500, f"The server could not read or write a file: {error}", code="file_error").response()
