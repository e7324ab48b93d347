"""The HTTP API of the embedded engine. Requests and responses have vLLM's formats."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from offbook.base.server_sent_events import EVENT_STREAM, event
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import DONE, error_body

from .chat.answers import AnswerWriter, CompletionWriter
from .chat.requests import (
    BAD_REQUEST,
    INTERNAL,
    NOT_FOUND,
    ChatCompletionRequest,
    CompletionRequest,
    DialectError,
    LoadAdapter,
    SamplingRequest,
    UnloadAdapter,
    checked,
    read_object,
)
from .decoding.generation import Failure, Generation, Update
from .service import SamplingService

logger = logging.getLogger(__name__)

_CLIENT_DISCONNECTED = 499  # nginx's status code


def build_app(service: SamplingService) -> FastAPI:
    """Build the application. It starts the service at its start, and closes it at its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.start()
        yield
        service.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.router.route_class = _ErrorRoute
    routes = Endpoints(service)
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", routes.completion, methods=["POST"], response_model=None)
    app.add_api_route("/v1/load_lora_adapter", routes.load, methods=["POST"], response_model=None)
    app.add_api_route("/v1/unload_lora_adapter", routes.unload, methods=["POST"], response_model=None)
    app.add_exception_handler(DialectError, _dialect_error)
    app.add_exception_handler(HTTPException, _unknown_route)
    return app


class _ErrorRoute(APIRoute):
    """A route that answers 500 to an unexpected exception. The framework would close the connection."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handle(request)
            except (DialectError, HTTPException):
                raise
            except Exception as error:  # later requests on this connection must still be answered
                logger.exception("%s failed", request.url.path)
                return JSONResponse(error_body(f"{type(error).__name__}: {error}", INTERNAL, None, 500), 500)

        return answered


class Endpoints:
    """The endpoints, one method each. They raise DialectError for invalid requests."""

    def __init__(self, service: SamplingService) -> None:
        self._service = service
        self._started = int(time.time())

    async def health(self) -> dict[str, object]:
        """The number of running calls. Answers 503 if the sampling thread has died."""
        if self._service.dead:
            raise DialectError("the engine has died: see its log, and restart it", status=503, kind=INTERNAL)
        return {"status": "ok", "running": self._service.running}

    async def models(self) -> dict[str, object]:
        """The base model and the loaded adapters."""
        base, limit = self._service.name, self._service.runner.max_model_len
        card = {"object": "model", "created": self._started, "owned_by": "offbook", "max_model_len": limit}
        adapters = [
            {**card, "id": name, "root": str(adapter.path), "parent": base}
            for name, adapter in self._service.adapters.items()
        ]
        return {"object": "list", "data": [{**card, "id": base, "root": base, "parent": None}, *adapters]}

    async def load(self, request: Request) -> Response:
        """Load an adapter from a folder under a new name."""
        fields = checked(LoadAdapter, read_object(await request.body()))
        if fields.load_inplace:
            raise DialectError("load_inplace is not supported: use a new name for each step", param="load_inplace")
        await self._service.load(fields.lora_name, Path(fields.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Unload an adapter. Running calls that use it finish."""
        fields = checked(UnloadAdapter, read_object(await request.body()))
        self._service.unload(fields.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    async def chat(self, request: Request) -> Response:
        """Sample an answer, as one JSON object or as server-sent events."""
        body = await request.body()
        return await self._answered(request, await self._service.read(body), len(body))

    async def completion(self, request: Request) -> Response:
        """Continue a prompt, as one JSON object or as server-sent events."""
        body = await request.body()
        return await self._answered(request, await self._service.read_completion(body), len(body))

    async def _answered(
        self, request: Request, sampling: ChatCompletionRequest | CompletionRequest, size: int
    ) -> Response:
        generations = await self._service.generations(sampling, size)
        writer = self._service.writer(sampling, generations[0].prompt_ids)
        if sampling.stream:
            return StreamingResponse(self._events(sampling, generations, writer), media_type=EVENT_STREAM)
        inbox = self._service.submit(generations)
        answer = asyncio.ensure_future(_collected(inbox, len(generations)))
        disconnected = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({answer, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=_CLIENT_DISCONNECTED)
            return JSONResponse(writer.whole(answer.result()))
        finally:
            answer.cancel()
            disconnected.cancel()
            self._service.release(generations)

    async def _events(
        self, request: SamplingRequest, generations: Sequence[Generation], writer: AnswerWriter | CompletionWriter
    ) -> AsyncIterator[bytes]:
        inbox = self._service.submit(generations)
        open_choices = len(generations)
        try:
            for index in range(len(generations)):
                yield _event(writer.opening(index))
            while open_choices:
                index, update = await inbox.get()
                if update.failure:
                    yield _event(_failed(update.failure).body())
                    break
                open_choices -= update.finish is not None
                yield _event(writer.chunk(index, update))
            if request.stream_options and request.stream_options.include_usage and not open_choices:
                yield _event(writer.usage_chunk())
            yield DONE
        finally:
            self._service.release(generations)


async def _collected(inbox: asyncio.Queue[tuple[int, Update]], count: int) -> list[Update]:
    """The last update of each choice, in order of index. Raises DialectError for the first that failed."""
    updates: dict[int, Update] = {}
    while len(updates) < count:
        index, update = await inbox.get()
        if update.failure:
            raise _failed(update.failure)
        updates[index] = update
    return [updates[index] for index in range(count)]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failed(failure: Failure) -> DialectError:
    kind = INTERNAL if failure.status >= 500 else BAD_REQUEST
    return DialectError(failure.message, status=failure.status, kind=kind, param=failure.param, code=failure.code)


def _event(body: dict[str, Json]) -> bytes:
    return event(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())


async def _dialect_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, DialectError)
    return JSONResponse(error.body(), status_code=error.status)


async def _unknown_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(str(error.detail), NOT_FOUND, None, error.status_code), error.status_code)
