"""`offbook mcp chat`: conversations with the model and the server's tools, side by side for several steps of the model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, cast

import typer
from openai import APIError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbook import History, TrainableModel
from offbook.base.console import Terminal
from offbook.base.terminal import echo
from offbook.base.text import counted, one_line, printable
from offbook.client.endpoint_model import FixedStepModel
from offbook.commands.help_pages import more_option
from offbook_mcp.commands.serve import served_tools
from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.connection.target import Target
from offbook_mcp.errors import McpServerError
from offbook_mcp.tools.rollout_tools import RolloutTools
from offbook_mcp.tools.toolset import Toolset
from offbook_mcp.training.agent_loop import SYSTEM, AgentLoop, LoopOptions, ToolRecord
from offbook_mcp.training.defaults import defaults_for
from offbook_mcp.training.mcp_trainer import MCPTrainerOptions
from offbook_mcp.training.rewards import EpisodeEnd
from offbook_mcp.training.scenario_rollouts import restricted

from .options import BaseName, ModelName, ServerDir, ServerUrl, model_from, typed_lines

_SHOWN_ARGUMENTS, _SHOWN_RESULT = 200, 300


@dataclass
class ChatSession:
    """A conversation of one model with its own sessions. After a server failure it continues with new sessions."""

    label: str
    model: TrainableModel
    pool: ServerPool
    options: LoopOptions
    result_chars: int
    toolset: Toolset
    history: History = field(default_factory=History)
    unanswered: int = 0
    """Questions without an answer so far."""
    _tools: RolloutTools | None = None

    async def ask(self, text: str) -> list[str]:
        """Send a user's message; return the tool calls and the answer as printable lines."""
        if not self.history.messages_and_choices:
            self.history.messages_and_choices.append(cast(Any, {"role": "system", "content": SYSTEM}))
        before = list(self.history.messages_and_choices)
        self.history.messages_and_choices.append(cast(Any, {"role": "user", "content": text}))
        records: list[ToolRecord] = []
        try:
            tools = await self._leased()
            loop = AgentLoop(self.model.openai_client(), self.model.inference_name(), tools, self.options, records)
            episode = await loop.run(self.history)
        except McpServerError as error:
            self.unanswered += 1
            self.release()
            self.history.messages_and_choices = before
            return [*call_lines(records), f"! {one_line(str(error), 600)}", "! the server is started anew"]
        except APIError as error:
            self.unanswered += 1
            self.history.messages_and_choices = before
            return [*call_lines(records), f"! the model did not answer: {one_line(str(error), 600)}"]
        ends = {
            EpisodeEnd.ANSWERED: f"{printable(episode.answer) or '(an empty answer)'}{' ... (cut off)' * episode.cut_off}",
            EpisodeEnd.TURN_LIMIT: f"! no answer after {self.options.max_turns} turns",
            EpisodeEnd.CONTEXT_FULL: "! the conversation fills the model's context: start a new one",
        }
        self.unanswered += episode.end is not EpisodeEnd.ANSWERED
        return [*call_lines(records), ends[episode.end]]

    def release(self) -> None:
        """Release the sessions."""
        if self._tools is not None:
            self.pool.release(self._tools)
            self._tools = None

    async def _leased(self) -> RolloutTools:
        if self._tools is None:
            self._tools = await self.pool.acquire()
        return restricted(self._tools, self.toolset, self.result_chars)


def call_lines(records: Sequence[ToolRecord]) -> Iterator[str]:
    """Two lines per call: the call, and the beginning of its result."""
    for record in records:
        yield f"-> {one_line(record.tool, 64)} {one_line(record.arguments, _SHOWN_ARGUMENTS)}"
        kind = "error" if record.result.is_error else f"{record.seconds:.2f} s"
        yield f"<- {kind}: {one_line(record.result.text, _SHOWN_RESULT)}"


async def chat(
    talks: Sequence[ChatSession], questions: AsyncIterable[str], console: Console, ready: Callable[[], None]
) -> None:
    """Send every question to all models and print the answers side by side. `ready` is called before every question."""
    ready()
    async for question in questions:
        if question.strip():
            answers = await asyncio.gather(*(conversation.ask(question) for conversation in talks))
            console.print(side_by_side([conversation.label for conversation in talks], answers))
        ready()


def side_by_side(labels: Sequence[str], answers: Sequence[Sequence[str]]) -> Table:
    """A table with a column per model. The texts are not parsed as markup."""
    table = Table(show_header=len(labels) > 1, show_edge=False, box=None, expand=len(labels) > 1, padding=(0, 2, 1, 0))
    for label in labels:
        table.add_column(Text(label), ratio=1, overflow="fold")
    table.add_row(*(Text("\n".join(lines)) for lines in answers))
    return table


Ask = Annotated[list[str], typer.Option(help="question to ask; repeatable  [default: questions that you type]")]
Step = Annotated[int | None, typer.Option(min=0, help="step of the model  [default: the newest]")]
Temperature = Annotated[float, more_option(min=0, max=2, help="sampling temperature; 0 is greedy")]


def talk(
    target: Target,
    model: ModelName = None,
    base: BaseName = None,
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
        models: list[tuple[str, TrainableModel]] = [(f"step {newest}", FixedStepModel(model, newest))]
        if compare:
            models.insert(0, ("step 0", FixedStepModel(model, 0)))
        echo(f"{model.name} at step {newest}, {counted(len(toolset.tools), 'tool')}; end with Ctrl-D", err=True)
        if newest == 0:
            echo("it is untrained: `offbook mcp train` trains it", err=True)
        questions: AsyncIterable[str] = _listed(ask) if ask else typed_lines(sys.stdin)
        prompting = not ask and sys.stdin.isatty()
        with ExitStack() as stack:
            talks = [ChatSession(label, model, pool, options, chars, toolset) for label, model in models]
            for conversation in talks:
                await conversation.model.register()
                stack.callback(conversation.release)
            await chat(talks, questions, console, lambda: echo("> ", nl=False) if prompting else None)
            if ask and any(talk.unanswered for talk in talks):
                raise typer.Exit(1)


async def _listed(questions: Sequence[str]) -> AsyncIterator[str]:
    for question in questions:
        yield question
