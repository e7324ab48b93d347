"""`offbook mcp serve`."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Annotated

import typer
import uvicorn

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.http_access import KEY_VARIABLE, key_for_host, key_option
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.commands.help_pages import more_option
from offbook.http_listener.config import listener_config
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target
from offbook_mcp.rollouts.agent_loop import LoopOptions
from offbook_mcp.serving.endpoint import ToolEndpoint
from offbook_mcp.serving.served_tools import served_tools
from offbook_mcp.training.defaults import defaults_for
from offbook_mcp.training.mcp_trainer import MCPTrainerOptions
from offbook_mcp.training.model_at_step import ModelAtStep

from .model_options import (
    BaseModel,
    ModelName,
    ServerDir,
    ServerUrl,
    model_from,
)

Host = Annotated[str, typer.Option(help="address to listen on; needs --api-key unless it is loopback")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="port; 0: any free one")]
Key = Annotated[
    str | None, typer.Option("--api-key", help=f"key that requests must carry, or @FILE  [default: {KEY_VARIABLE}]")
]
AtOnce = Annotated[int, more_option(min=1, help="requests answered at once; others wait")]


def serve(
    target: Target,
    model: ModelName = None,
    base: BaseModel = None,
    host: Host = "127.0.0.1",
    port: Port = 8900,
    api_key: Key = None,
    step: Annotated[int | None, typer.Option(min=0, help="step of the model  [default: the newest]")] = None,
    concurrency: AtOnce = 16,
    temperature: Annotated[
        float, more_option(min=0, max=2, help="temperature if the request sets none; 0 is greedy")
    ] = 0.0,
    max_turns: Annotated[int, more_option(min=1, help="model requests for one answer")] = MCPTrainerOptions.max_turns,
    dir: ServerDir = None,
    url: ServerUrl = None,
) -> None:
    """Serve the model, with its tools, behind OpenAI's API.

    The command makes the tool calls itself. Clients get the final answer.
    """
    key = key_for_host(host, key_option(api_key))
    listener = listening(host, port)
    named = model_from(target, model, base, dir, url)
    chosen = named if step is None else ModelAtStep(named, step)
    options = LoopOptions(max_turns, temperature, defaults_for(named.base_model).max_completion_tokens)
    asyncio.run(_serve(target, chosen, options, concurrency, listener, key))


async def _serve(
    target: Target,
    model: TrainableModel,
    options: LoopOptions,
    concurrency: int,
    listener: socket.socket,
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
        echo(f"{model.name} with {counted(len(toolset.tools), 'tool')} at {address(listener)}/v1")
        await uvicorn.Server(config).serve([listener])


def listening(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ConfigError(f"--host, --port: cannot listen on {host}:{port}: {error.strerror or error}") from error


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
