"""OpenAI's endpoints: chat completions and models, plain and below `/t/{trajectory id}`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from .chat_request import ChatRequest
from .exchange import ChatExchange
from .services import Given, services

router = APIRouter()


class ModelCard(BaseModel):
    """One name that calls may use. The names of steps come and go, so none has a date of its own."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "understudy"


class ModelCards(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


async def chat(request: Request) -> Response:
    """Sample, record, answer. The answer is an exchange of its own: see ChatExchange."""
    given = await services(request)
    trajectory_id = request.path_params.get("trajectory_id")
    asked = ChatRequest.parse(await request.body(), request.headers, trajectory_id, given.engine.quirks)
    given.models.resolve(asked.model)
    return ChatExchange(asked, given.models, given.sampler, given.recorder)


# Routes of Starlette: those of FastAPI read nothing more here, and each call would pay for them.
router.add_route("/v1/chat/completions", chat, methods=["POST"])
router.add_route("/t/{trajectory_id}/v1/chat/completions", chat, methods=["POST"])


@router.get("/v1/models")
@router.get("/t/{trajectory_id}/v1/models")
async def list_models(given: Given) -> ModelCards:
    """Every model, and `name@step` for every step that can be called."""
    return ModelCards(data=[ModelCard(id=name) for name in given.models.names()])


@router.get("/v1/models/{name:path}")
@router.get("/t/{trajectory_id}/v1/models/{name:path}")
async def one_model(name: str, given: Given) -> ModelCard:
    """One name, if a call may use it."""
    given.models.resolve(name)
    return ModelCard(id=name)
