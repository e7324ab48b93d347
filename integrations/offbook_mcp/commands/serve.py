"""`offbook mcp serve`: an OpenAI-compatible endpoint of a model with built-in tools. It runs the tool calls itself."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, cast

import pydantic
import typer
import uvicorn
from openai import APIError, APIStatusError
from pydantic import ConfigDict, Field, JsonValue, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from offbook import History, TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.http_access import KEY_VARIABLE, key_for_host, key_option
from offbook.base.server_sent_events import EVENT_STREAM
from offbook.base.terminal import echo
from offbook.base.text import counted, one_line
from offbook.base.types import Message, new_id
from offbook.client.model import FixedStepModel
from offbook.commands.help_pages import more_option
from offbook.http_listener.access_checks import AccessChecks, Application, single_key
from offbook.http_listener.config import listener_config
from offbook.http_listener.listening import listen, url_of
from offbook.openai_dialect.chat_answer import (
    WHOLE,
    Answer,
    ModelCard,
    ModelCards,
    chunks_of,
    error_body,
    events,
    head,
    kind_of,
    usage,
)
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target
from offbook_mcp.errors import McpServerError
from offbook_mcp.scenarios.explore import withheld_lines
from offbook_mcp.tools.toolset import Toolset
from offbook_mcp.training.agent_loop import SYSTEM, AgentLoop, LoopOptions
from offbook_mcp.training.defaults import defaults_for
from offbook_mcp.training.mcp_trainer import MCPTrainerOptions
from offbook_mcp.training.rewards import EpisodeEnd, ToolEpisode
from offbook_mcp.training.scenario_rollouts import restricted

from .options import BaseName, ModelName, ServerDir, ServerUrl, model_from

logger = logging.getLogger("offbook")


class SpokenMessage(pydantic.BaseModel):
    """A message of the request. Clients send no tool messages, since the endpoint writes them."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, JsonValue]]

    def plain(self) -> dict[str, object]:
        """The message with its text parts joined. Raises ValueError for a part that is not text."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        if other := next((part for part in self.content if part.get("type") != "text"), None):
            raise ValueError(f"messages: this model reads text only, got a part of type {other.get('type')!r}")
        return {"role": role, "content": "".join(str(part.get("text", "")) for part in self.content)}


class ServedRequest(pydantic.BaseModel):
    """The supported fields of OpenAI's request. `tools` are rejected, other fields ignored."""

    model_config = ConfigDict(extra="ignore")

    messages: list[SpokenMessage] = Field(min_length=1)
    model: str = ""
    stream: bool = False
    n: Literal[1] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    tools: list[JsonValue] | None = None

    def history(self) -> History:
        """The conversation, with the default system prompt if it has none. Raises ValueError."""
        if self.tools:
            raise ValueError("tools: this model has its tools built in; leave them out")
        if self.messages[-1].role != "user":
            raise ValueError(f"messages: the last one must be the user's, got one of role {self.messages[-1].role!r}")
        messages = [message.plain() for message in self.messages]
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": SYSTEM})
        return History(messages_and_choices=cast(list[object], messages))  # type: ignore[arg-type]  # pydantic takes dicts


def completion(model: str, episode: ToolEpisode, loop: AgentLoop) -> Answer:
    """The response body. The additional field `tool_calls` lists the tool calls that were made."""
    message = {"role": "assistant", "content": episode.answer, "refusal": None}
    return {
        **head(WHOLE, new_id("chatcmpl"), int(time.time()), model),
        "choices": [{"index": 0, "message": message, "finish_reason": _reason(episode), "logprobs": None}],
        "usage": usage(loop.prompt_tokens, loop.completion_tokens),
        "tool_calls": [{**record.as_json(), "arguments": record.arguments} for record in loop.records],
    }


def one_delta(message: Message) -> Iterator[Answer]:
    """The text in one piece, since it is known only after all tool calls."""
    yield {"role": "assistant", "content": message["content"]}


def _reason(episode: ToolEpisode) -> str:
    return "stop" if episode.end is EpisodeEnd.ANSWERED and not episode.cut_off else "length"


async def _disconnected(request: Request, _: Exception) -> Response:
    logger.info("%s %s: the client disconnected before the request was complete", request.method, request.url.path)
    return Response()  # nobody reads it


def fault(status: int, code: str, message: str) -> JSONResponse:
    """An error response in OpenAI's format."""
    return JSONResponse(error_body(message, kind_of(status), code=code), status_code=status)


LARGEST_REQUEST = 8 * 2**20


@dataclass(frozen=True)
class ToolEndpoint:
    """The endpoint of one model. Every request has its own sessions, unless the target shares them."""

    pool: ServerPool
    model: TrainableModel
    options: LoopOptions
    result_chars: int
    toolset: Toolset

    def application(self, key: str | None) -> Application:
        """The ASGI application, behind the checks of key, host, origin and size."""
        routes = [
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        served = Starlette(routes=routes, exception_handlers={ClientDisconnect: _disconnected})
        return AccessChecks(served, single_key(key), LARGEST_REQUEST)

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`: the served model."""
        return JSONResponse(ModelCards(data=[ModelCard(id=self.model.name)]).model_dump())

    async def health(self, _: Request) -> Response:
        """`GET /health`: answers without a key."""
        return JSONResponse({"status": "ok"})

    async def complete(self, request: Request) -> Response:
        """`POST /v1/chat/completions`: run the agent loop and return the final answer."""
        body = await request.body()
        try:
            served = ServedRequest.model_validate_json(body)
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
        if not served.stream:
            return JSONResponse(whole)
        return StreamingResponse(events(chunks_of(whole, one_delta)), media_type=EVENT_STREAM)

    def _options(self, request: ServedRequest) -> LoopOptions:
        lengths = (request.max_completion_tokens, request.max_tokens, self.options.max_completion_tokens)
        temperature = self.options.temperature if request.temperature is None else request.temperature
        length = min((limit for limit in lengths if limit is not None), default=None)
        return replace(self.options, temperature=temperature, max_completion_tokens=length)


Host = Annotated[str, typer.Option(help="address to listen on; needs --api-key unless it is loopback")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="port; 0: any free one")]
Key = Annotated[
    str | None, typer.Option("--api-key", help=f"key that requests must carry, or @FILE  [default: {KEY_VARIABLE}]")
]
AtOnce = Annotated[int, more_option(min=1, help="requests answered at once; others wait")]


def serve(
    target: Target,
    model: ModelName = None,
    base: BaseName = None,
    host: Host = "127.0.0.1",
    port: Port = 8900,
    api_key: Key = None,
    step: Annotated[int | None, more_option(min=0, help="step of the model  [default: the newest]")] = None,
    concurrency: AtOnce = 16,
    max_turns: Annotated[int, more_option(min=1, help="model requests for one answer")] = MCPTrainerOptions.max_turns,
    dir: ServerDir = None,
    url: ServerUrl = None,
) -> None:
    """Serve the model, with its tools, behind OpenAI's API.

    The command makes the tool calls itself. Clients get the final answer.
    """
    key = key_for_host(host, key_option(api_key))
    listener = listen(host, port)
    named = model_from(target, model, base, dir, url)
    chosen = named if step is None else FixedStepModel(named, step)
    options = LoopOptions(max_turns, 0.0, defaults_for(named.base_model).max_completion_tokens)
    asyncio.run(_serve(target, chosen, options, concurrency, listener, url_of(host, listener), key))


async def _serve(
    target: Target,
    model: TrainableModel,
    options: LoopOptions,
    concurrency: int,
    listener: socket.socket,
    url: str,
    key: str | None,
) -> None:
    chars = target.limits.result_chars
    chars = min(chars, defaults_for(model.base_model).result_chars or chars)
    async with ServerPool(target, max_rollouts=concurrency) as pool:
        toolset = served_tools(pool.toolset, model, partial(echo, err=True))
        await model.register()
        if await model.get_step() == 0:
            echo(f"{model.name} is untrained: `offbook mcp train` trains it", err=True)
        endpoint = ToolEndpoint(pool, model, options, chars, toolset)
        config = listener_config(endpoint.application(key))
        echo(f"{model.name} with {counted(len(toolset.tools), 'tool')} at {url}/v1")
        await uvicorn.Server(config).serve([listener])


def served_tools(toolset: Toolset, model: TrainableModel, say: Callable[[str], None]) -> Toolset:
    """The tools that may be called. Says which may not.

    Raises ConfigError if none is left, or for more than the base model can read.
    """
    for line in withheld_lines(toolset.left_out):
        say(line)
    tools = toolset.tools
    if not tools:
        raise ConfigError("no tools: none may be called; permit them with --allow TOOL or --allow-all")
    most = defaults_for(model.base_model).most_tools
    if most is not None and len(tools) > most:
        raise ConfigError(
            f"{model.base_model} reads at most {most} tools, the target offers {len(tools)}: choose some with --only TOOL "
            "(repeat it), or take another --base-model"
        )
    return toolset
