"""An OpenAI-compatible endpoint of a model with built-in tools: the endpoint itself runs the tool calls."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from openai import APIError, APIStatusError
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from offbook import TrainableModel
from offbook.base.text import one_line
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.errors import McpServerError
from offbook_mcp.rollouts.agent_loop import AgentLoop, LoopOptions
from offbook_mcp.rollouts.rollout import restricted
from offbook_mcp.tools.toolset import Toolset

from .access import OPEN_PATH, KeyGate, fault
from .served_completion import ServedRequest, chunks, completion

logger = logging.getLogger("offbook")
LARGEST_REQUEST = 8 * 2**20


@dataclass(frozen=True)
class ToolEndpoint:
    """The endpoint of one model. Every request has its own sessions, unless the target shares them."""

    pool: ServerPool
    model: TrainableModel
    options: LoopOptions
    result_chars: int
    toolset: Toolset

    def application(self, key: str | None) -> ASGIApp:
        """The ASGI application, behind the key."""
        routes = [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route(OPEN_PATH, self.health),
        ]
        return KeyGate(Starlette(routes=routes), key)

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`: the served model."""
        card = {"id": self.model.name, "object": "model", "created": 0, "owned_by": "offbook"}
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, _: Request) -> Response:
        """`GET /health`: answers without a key."""
        return JSONResponse({"status": "ok"})

    async def complete(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: run the agent loop and return the final answer."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_REQUEST:
                return fault(413, "request_too_large", f"a request may have {LARGEST_REQUEST} bytes")
        try:
            served = ServedRequest.model_validate_json(bytes(body))
            history = served.history()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            return fault(400, "invalid_value", f"{where}: {first['msg']}")
        except ValueError as error:
            return fault(400, "invalid_value", str(error))
        if served.model not in ("", self.model.name, self.model.inference_name()):
            return fault(
                404,
                "model_not_found",
                f"there is no model {one_line(served.model, 80)!r} here, only {self.model.name!r}",
            )
        options = self._options(served)
        try:
            async with self.pool.rollout() as leased:
                tools = restricted(leased, self.toolset, self.result_chars)
                loop = AgentLoop(self.model.openai_client(), self.model.inference_name(), tools, options)
                episode = await loop.run(history)
        except McpServerError as error:
            logger.warning("a request failed: %s", one_line(str(error), 600))
            return fault(502, "mcp_server_failed", one_line(str(error), 600))
        except APIStatusError as error:
            return fault(error.status_code, error.code or "model_failed", one_line(str(error), 600))
        except APIError as error:
            return fault(502, "model_failed", one_line(str(error), 600))
        whole = completion(self.model.name, episode, loop)
        return (
            StreamingResponse(chunks(whole), media_type="text/event-stream") if served.stream else JSONResponse(whole)
        )

    def _options(self, request: ServedRequest) -> LoopOptions:
        lengths = (request.max_completion_tokens, request.max_tokens, self.options.max_completion_tokens)
        temperature = self.options.temperature if request.temperature is None else request.temperature
        length = min((limit for limit in lengths if limit is not None), default=None)
        return replace(self.options, temperature=temperature, max_completion_tokens=length)
