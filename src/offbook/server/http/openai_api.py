"""The endpoints for calls of a model, in every API, and for the list of models, also below `/m/{model}/t/{trajectory id}`."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from offbook.base.errors import OffbookError
from offbook.base.types import CallOrigin
from offbook.base.wire import LENGTH_HEADER, ORIGIN_HEADER, TRAJECTORY_HEADER
from offbook.openai_dialect.chat_answer import ModelCard, ModelCards

from ..calls.chat_exchange import ChatExchange
from ..calls.chat_request import ChatRequest, json_body
from ..dialects import Dialect, DialectRequest
from ..errors import ApiError, refusal_of
from ..services import Services, ServicesDep
from .model_paths import found_path, model_of, without_temperature

router = APIRouter()
_LONGEST_NAME = 200


class ModelCalls:
    """ASGI middleware for the calls of a model (see ChatExchange). Handled before FastAPI's router to avoid its per-call cost."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = found_path(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            return await self._app(_without_temperature(scope), receive, send)
        match, dialect = found
        what = f"{scope['method']} {scope['path']}"
        try:
            if scope["method"] != "POST":
                raise _wrong_method(what, scope)
            answer = await self._exchange(Request(scope, receive), match, dialect)
        except OffbookError as error:
            refusal = refusal_of(error, what)
            headers = {"allow": "POST"} if refusal.status == 405 else None
            body = refusal.body() if dialect is None else dialect.refusal(refusal)
            answer = JSONResponse(body, refusal.status, headers)
        await answer(scope, receive, send)

    async def _exchange(self, request: Request, match: re.Match[str], dialect: Dialect | None) -> ChatExchange:
        services = self._services
        headers = dict(request.headers)  # Starlette's Headers scan the whole list at every access
        raw = await request.body()
        trajectory, rendering, kind = match["trajectory"], None, ChatRequest
        body = json_body(raw)
        own = body.get("model")
        if dialect is not None:
            # A program's key opens the recorded calls of its trajectory.
            recorded = services.recorder.sampled.within(request.state.access.trajectory)
            sampled = await recorded.of(trajectory or headers.get(TRAJECTORY_HEADER))
            translation = await dialect.translate(
                DialectRequest(body, match.groupdict(), request.query_params, sampled, recorded)
            )
            body, rendering = translation.body, translation.rendering
            kind = translation.request
            if kind is ChatRequest:
                headers[LENGTH_HEADER] = "fit"  # these clients always send a length, and often one beyond the context
            if not translation.recorded:
                trajectory, headers = None, {LENGTH_HEADER: "fit"}
        if match["model"] is not None:
            own = own or body.get("model")  # some APIs have it in the path
            if isinstance(own, str) and own != match["model"]:  # as an adapter says it of an app's call
                origin = CallOrigin(model=own[:_LONGEST_NAME])
                headers.setdefault(ORIGIN_HEADER, origin.model_dump_json(exclude_defaults=True))
            body = body | {"model": match["model"]}
        if match["temperature"] is not None:
            body = body | {"temperature": _temperature(match["temperature"])}
        chat = kind.of(body, headers, trajectory, services.engine.quirks, len(raw))
        if dialect is None and any(message.get("tool_calls") for message in chat.messages):
            sampled = await services.recorder.sampled.of(chat.trajectory_id)
            chat = chat.with_messages(sampled.restored(chat.messages))
        services.models.registry.resolve(chat.model)
        return ChatExchange(chat, services.models.leases, services.sampler.calls, services.recorder, rendering)


def _without_temperature(scope: Scope) -> Scope:
    return {**scope, "path": without_temperature(scope["path"])} if scope["type"] == "http" else scope


def _temperature(text: str) -> float:
    """The temperature in a URL. Its range is that of the field. Raises ApiError."""
    try:
        return float(text)
    except ValueError:
        raise ApiError(400, f"the URL has /at/{text!r:.60}; a temperature is needed", "temperature") from None


def _wrong_method(what: str, scope: Scope) -> ApiError:
    upgrade = next((value for name, value in scope["headers"] if name == b"upgrade"), b"")
    if upgrade.lower() == b"websocket":
        return ApiError(426, f"{what}: there are no WebSockets here, send a POST")  # clients then do so, at once
    return ApiError(405, f"{what}: only POST is allowed here")


@router.get("/v1/models")
@router.get("/t/{trajectory_id}/v1/models")
@router.get("/m/{model:path}/v1/models", include_in_schema=False)
async def list_models(services: ServicesDep) -> ModelCards:
    """All model names that calls may use: every model, `name@step` for every callable step, and the base model."""
    return ModelCards(data=[ModelCard(id=name) for name in services.models.registry.names()])


@router.get("/v1/models/{name:path}")
@router.get("/t/{trajectory_id}/v1/models/{name:path}")
@router.get("/m/{model:path}/v1/models/{name:path}", include_in_schema=False)
async def one_model(name: str, request: Request, services: ServicesDep) -> ModelCard:
    """One model name. 404 if calls cannot use it; below a model calls can use any name."""
    services.models.registry.resolve(model_of(request.scope["path"]) or name)
    return ModelCard(id=name)
