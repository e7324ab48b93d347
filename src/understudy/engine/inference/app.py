"""vLLM's HTTP dialect over the sampling service."""

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

from ...types import Json
from .chat.answers import AnswerWriter
from .chat.requests import (
    BAD_REQUEST,
    INTERNAL,
    NOT_FOUND,
    ChatCompletionRequest,
    DialectError,
    LoadAdapter,
    UnloadAdapter,
    checked,
    error_body,
    read_object,
)
from .decoding.generation import Failure, Generation, Update
from .service import SamplingService

_log = logging.getLogger(__name__)

_CLIENT_GONE = 499


def build_app(service: SamplingService) -> FastAPI:
    """The engine's endpoints. The service starts and ends with the app."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.start()
        yield
        service.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.router.route_class = _Answered
    routes = Endpoints(service)
    app.add_api_route("/health", routes.health, methods=["GET"])
    app.add_api_route("/v1/models", routes.models, methods=["GET"])
    app.add_api_route("/v1/chat/completions", routes.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/load_lora_adapter", routes.load, methods=["POST"], response_model=None)
    app.add_api_route("/v1/unload_lora_adapter", routes.unload, methods=["POST"], response_model=None)
    app.add_exception_handler(DialectError, _refused)
    app.add_exception_handler(HTTPException, _not_served)
    return app


class _Answered(APIRoute):
    """A defect of ours is an answer too. Left to the framework, it would cost the connection."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handle(request)
            except (DialectError, HTTPException):
                raise
            except Exception as error:  # noqa: BLE001  # whatever it was, the others on this connection go on
                _log.exception("%s failed", request.url.path)
                return JSONResponse(error_body(f"{type(error).__name__}: {error}", INTERNAL, None, 500), 500)

        return answered


class Endpoints:
    """One method per endpoint."""

    def __init__(self, service: SamplingService) -> None:
        self._service = service
        self._started = int(time.time())

    async def health(self) -> dict[str, object]:
        """200 while the engine lives, else 503; how many calls are being sampled."""
        if self._service.dead:
            raise DialectError("the engine has died; see its log", status=503, kind=INTERNAL)
        return {"status": "ok", "running": self._service.running}

    async def models(self) -> dict[str, object]:
        """The base and the adapters."""
        base, limit = self._service.name, self._service.runner.max_model_len
        card = {"object": "model", "created": self._started, "owned_by": "understudy", "max_model_len": limit}
        adapters = [
            {**card, "id": name, "root": str(adapter.path), "parent": base}
            for name, adapter in self._service.adapters.items()
        ]
        return {"object": "list", "data": [{**card, "id": base, "root": base, "parent": None}, *adapters]}

    async def load(self, request: Request) -> Response:
        """Serve an adapter folder under a new name."""
        wanted = checked(LoadAdapter, read_object(await request.body()))
        if wanted.load_inplace:
            raise DialectError("load_inplace is not supported: use a new name for each step", param="load_inplace")
        await self._service.load(wanted.lora_name, Path(wanted.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Serve an adapter no longer."""
        wanted = checked(UnloadAdapter, read_object(await request.body()))
        self._service.unload(wanted.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")

    async def chat(self, request: Request) -> Response:
        """Sample an answer; whole, or as server-sent events."""
        body = await request.body()
        asked = await self._service.read(body)
        generations = await self._service.generations(asked, len(body))
        writer = self._service.writer(asked, generations[0].prompt_ids)
        if asked.stream:
            return StreamingResponse(self._events(asked, generations, writer), media_type="text/event-stream")
        inbox = self._service.submit(generations)
        answer = asyncio.ensure_future(_collected(inbox, len(generations)))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=_CLIENT_GONE)
            return JSONResponse(writer.whole(_unfailed(answer.result())))
        finally:
            answer.cancel()
            gone.cancel()
            self._service.release(generations)

    async def _events(
        self, asked: ChatCompletionRequest, generations: Sequence[Generation], writer: AnswerWriter
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
            if asked.stream_options and asked.stream_options.include_usage and not open_choices:
                yield _event(writer.usage_chunk())
            yield b"data: [DONE]\n\n"
        finally:
            self._service.release(generations)


async def _collected(inbox: asyncio.Queue[tuple[int, Update]], count: int) -> list[Update]:
    """The last update of each choice, in order."""
    found: dict[int, Update] = {}
    while len(found) < count:
        index, update = await inbox.get()
        found[index] = update
        if update.failure:
            return [update]
    return [found[index] for index in range(count)]


async def _disconnected(request: Request) -> None:
    """Returns when the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _unfailed(updates: list[Update]) -> list[Update]:
    failure = next((update.failure for update in updates if update.failure), None)
    if failure:
        raise _failed(failure)
    return updates


def _failed(failure: Failure) -> DialectError:
    kind = INTERNAL if failure.status >= 500 else BAD_REQUEST
    return DialectError(failure.message, status=failure.status, kind=kind, param=failure.param, code=failure.code)


def _event(body: dict[str, Json]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, DialectError)
    return JSONResponse(error.body(), status_code=error.status)


async def _not_served(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(str(error.detail), NOT_FOUND, None, error.status_code), error.status_code)
