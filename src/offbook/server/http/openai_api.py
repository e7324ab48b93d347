"""OpenAI's endpoints for chat completions, completions and models, also below `/t/{trajectory id}`."""

from __future__ import annotations

import logging
import re

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from offbook.base.errors import OffbookError
from offbook.openai_dialect.model_list import ModelCard, ModelCards

from ..calls.chat_exchange import ChatExchange
from ..calls.chat_request import ChatRequest
from ..calls.prompt_request import PromptRequest
from ..dialects.completions import CompletionAnswer
from ..dialects.translated import Translated
from ..errors import ApiError, refused
from ..services import Services, ServicesDep

logger = logging.getLogger(__name__)

router = APIRouter()

_CALLS = re.compile(r"(/t/(?P<trajectory>[^/]+))?/v1/(?P<chat>chat/)?completions/?")


class ChatCompletions:
    """ASGI middleware for chat completions, and completions of a prompt (see ChatExchange). Handled before FastAPI's router to avoid its per-call cost."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = _CALLS.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if match is None:
            return await self._app(scope, receive, send)
        what = f"{scope['method']} {scope['path']}"
        try:
            if scope["method"] == "POST":
                answer = await self._exchange(Request(scope, receive), match["trajectory"], chat=bool(match["chat"]))
            else:
                answer = ApiError(405, f"{what}: only POST is allowed here").response({"allow": "POST"})
        except ClientDisconnect:  # the client disconnected while sending its body
            logger.debug("%s: the client disconnected before its request was complete", what)
            return
        except OffbookError as error:
            answer = refused(error, what)
        await answer(scope, receive, send)

    async def _exchange(self, request: Request, trajectory_id: str | None, *, chat: bool) -> Response:
        services = self._services
        headers = dict(request.headers)  # Starlette's Headers scan the whole list at every access
        kind = ChatRequest if chat else PromptRequest
        call = kind.parse(await request.body(), headers, trajectory_id, services.engine.quirks)
        services.models.registry.resolve(call.model)
        exchange = ChatExchange(call, services.models.leases, services.sampler.calls, services.recorder)
        return exchange if chat else Translated(exchange, CompletionAnswer())


@router.get("/v1/models")
@router.get("/t/{trajectory_id}/v1/models")
async def list_models(services: ServicesDep) -> ModelCards:
    """All model names that calls may use: every model, `name@step` for every callable step, and the base model."""
    return ModelCards(data=[ModelCard(id=name) for name in services.models.registry.names()])


@router.get("/v1/models/{name:path}")
@router.get("/t/{trajectory_id}/v1/models/{name:path}")
async def one_model(name: str, services: ServicesDep) -> ModelCard:
    """One model name. 404 if calls cannot use it."""
    services.models.registry.resolve(name)
    return ModelCard(id=name)
