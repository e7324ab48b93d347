"""`offbook mcp chat`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from offbook import TrainableModel
from offbook.base.terminal import Terminal, echo
from offbook.base.text import counted
from offbook.commands.help_pages import more_option
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target
from offbook_mcp.rollouts.agent_loop import LoopOptions
from offbook_mcp.serving.chat import chat, conversations
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
from .permissions import typed_lines

Ask = Annotated[list[str], typer.Option(help="question to ask; repeatable  [default: questions that you type]")]
Step = Annotated[int | None, typer.Option(min=0, help="step of the model  [default: the newest]")]
Temperature = Annotated[float, more_option(min=0, max=2, help="sampling temperature; 0 is greedy")]


def talk(
    target: Target,
    model: ModelName = None,
    base: BaseModel = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="show the untrained model's answer (step 0) beside it")
    ] = False,
    ask: Ask = [],  # noqa: B006  # typer reads it
    step: Step = None,
    temperature: Temperature = 0.0,
    max_turns: Annotated[int, more_option(min=1, help="model requests for one answer")] = MCPTrainerOptions.max_turns,
    dir: ServerDir = None,
    url: ServerUrl = None,
) -> None:
    """Talk to the model, which calls the server's tools."""
    named = model_from(target, model, base, dir, url)
    options = LoopOptions(max_turns, temperature, defaults_for(named.base_model).max_completion_tokens)
    asyncio.run(_talk(target, named, step, compare, ask, options, Terminal()))


async def _talk(
    target: Target,
    model: TrainableModel,
    step: int | None,
    compare: bool,
    ask: Sequence[str],
    options: LoopOptions,
    console: Console,
) -> None:
    chars = target.limits.result_chars
    chars = min(chars, defaults_for(model.base_model).result_chars or chars)
    async with ServerPool(target, max_rollouts=2, ahead=0) as pool:
        toolset = served_tools(pool.toolset, model, partial(echo, err=True))
        newest = await model.get_step() if step is None else step
        models: list[tuple[str, TrainableModel]] = [(f"step {newest}", ModelAtStep(model, newest))]
        if compare:
            models.insert(0, ("step 0", ModelAtStep(model, 0)))
        echo(f"{model.name} at step {newest}, {counted(len(toolset.tools), 'tool')}; end with Ctrl-D", err=True)
        if newest == 0:
            echo("it is untrained: `offbook mcp train` trains it", err=True)
        questions: AsyncIterable[str] = _listed(ask) if ask else typed_lines(sys.stdin)
        prompting = not ask and sys.stdin.isatty()
        async with conversations(pool, models, options, chars, toolset) as talks:
            await chat(talks, questions, console, lambda: echo("> ", nl=False) if prompting else None)
            if ask and any(talk.unanswered for talk in talks):
                raise typer.Exit(1)


async def _listed(questions: Sequence[str]) -> AsyncIterator[str]:
    for question in questions:
        yield question
