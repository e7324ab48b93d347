"""`offbook mcp chat`: conversations with the model and the server's tools, also beside the untrained model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, cast

import typer
from openai import APIError

from offbook import History, TrainableModel
from offbook.base.terminal import echo
from offbook.base.text import counted, one_line, printable
from offbook.client.model import FixedStepModel
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
        before = list(self.history.messages_and_choices)
        opening = [] if before else [{"role": "system", "content": SYSTEM}]
        self.history.messages_and_choices += cast(Any, [*opening, {"role": "user", "content": text}])
        records: list[ToolRecord] = []
        try:
            self._tools = self._tools or await self.pool.acquire()
            tools = restricted(self._tools, self.toolset, self.result_chars)
            loop = AgentLoop(self.model.openai_client(), self.model.inference_name(), tools, self.options, records)
            episode = await loop.run(self.history)
        except (McpServerError, APIError) as error:
            self.unanswered += 1
            self.history.messages_and_choices = before
            lines = [*call_lines(records), f"! {one_line(str(error), 600)}"]
            if isinstance(error, McpServerError):
                self.release()
                lines.append("! the server is started anew")
            return lines
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


def call_lines(records: Sequence[ToolRecord]) -> Iterator[str]:
    """Two lines per call: the call, and the beginning of its result."""
    for record in records:
        yield f"-> {one_line(record.tool, 64)} {one_line(record.arguments, _SHOWN_ARGUMENTS)}"
        kind = "error" if record.result.is_error else f"{record.seconds:.2f} s"
        yield f"<- {kind}: {one_line(record.result.text, _SHOWN_RESULT)}"


Ask = Annotated[list[str], typer.Option(help="question to ask; repeatable  [default: questions that you type]")]
Step = Annotated[int | None, typer.Option(min=0, help="step of the model  [default: the newest]")]


def talk(
    target: Target,
    model: ModelName = None,
    base: BaseName = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="show the untrained model's answer (step 0) beside it")
    ] = False,
    ask: Ask = [],  # noqa: B006  # typer reads it
    step: Step = None,
    max_turns: Annotated[int, more_option(min=1, help="model requests for one answer")] = MCPTrainerOptions.max_turns,
    dir: ServerDir = None,
    url: ServerUrl = None,
) -> None:
    """Talk to the model, which calls the server's tools."""
    named = model_from(target, model, base, dir, url)
    options = LoopOptions(max_turns, 0.0, defaults_for(named.base_model).max_completion_tokens)
    asyncio.run(_talk(target, named, step, compare, ask, options))


async def _talk(
    target: Target,
    model: TrainableModel,
    step: int | None,
    compare: bool,
    ask: Sequence[str],
    options: LoopOptions,
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
        prompt = "> " if not ask and sys.stdin.isatty() else ""
        with ExitStack() as stack:
            talks = [ChatSession(label, model, pool, options, chars, toolset) for label, model in models]
            for conversation in talks:
                await conversation.model.register()
                stack.callback(conversation.release)
            echo(prompt, nl=False)
            async for question in questions:
                if question.strip():
                    answers = await asyncio.gather(*(conversation.ask(question) for conversation in talks))
                    for conversation, lines in zip(talks, answers, strict=True):
                        echo("\n".join([f"{conversation.label}:", *lines, ""] if compare else lines))
                echo(prompt, nl=False)
            if ask and any(talk.unanswered for talk in talks):
                raise typer.Exit(1)


async def _listed(questions: Sequence[str]) -> AsyncIterator[str]:
    for question in questions:
        yield question
