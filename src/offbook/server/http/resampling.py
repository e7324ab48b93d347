"""`POST /pages/resample`: answers a recorded prompt with another step, for a rollout's page. It is not recorded."""

from __future__ import annotations

import json

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from offbook.base.types import Call, Json
from offbook.base.wire import LENGTH_HEADER, name_at

from ..calls.chat_exchange import ChatExchange
from ..calls.chat_request import ChatRequest
from ..calls.prompt_request import PROMPT, PromptRequest
from ..errors import ApiError
from ..services import ServicesDep

router = APIRouter()

LEAST_TOKENS = 256
"""An answer may have this many tokens, or twice as many as the recorded one."""


class ResampleRequest(BaseModel):
    """A recorded call, and the step of its model that should answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trajectory: str = Field(min_length=1, max_length=200)
    call: str = Field(min_length=1, max_length=200)
    step: int = Field(ge=0, lt=2**31)


@router.post("/pages/resample")
async def resample(body: ResampleRequest, services: ServicesDep) -> ChatExchange:
    """Answer with the step under the call's sampling settings. Raises ApiError 404 for an unknown call."""
    trajectory = await services.store.trajectory(body.trajectory)
    call = next((call for call in trajectory.calls if call.id == body.call), None) if trajectory is not None else None
    if call is None:
        raise ApiError(
            404, f"There is no call {body.call!r} in the rollout {body.trajectory!r}", "call", "unknown_call"
        )
    payload = _payload(call, body.step)
    kind = PromptRequest if PROMPT in payload else ChatRequest
    chat = kind.parse(json.dumps(payload).encode(), {LENGTH_HEADER: "fit"}, None, services.engine.quirks)
    services.models.registry.resolve(chat.model)
    return ChatExchange(chat, services.models.leases, services.sampler.calls, services.recorder)


def _payload(call: Call, step: int) -> dict[str, Json]:
    longest = max((len(output.token_ids) for output in call.outputs), default=0)
    payload: dict[str, Json] = {
        "model": name_at(call.model, step),
        "temperature": call.sampling.temperature,
        "top_p": call.sampling.top_p,
        "max_tokens": max(LEAST_TOKENS, 2 * longest),
    }
    if any(message.get("role") == PROMPT for message in call.messages):
        payload[PROMPT] = list(call.prompt_ids)
    else:
        payload["messages"] = list(call.messages)
    if call.sampling.top_k:
        payload["top_k"] = call.sampling.top_k
    if call.sampling.min_p:
        payload["min_p"] = call.sampling.min_p
    if call.tools:
        payload["tools"] = list(call.tools)
    return payload
