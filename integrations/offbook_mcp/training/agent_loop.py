"""A plain agent loop: sample the model, run its tool calls, append the results, until it answers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from openai import AsyncOpenAI, BadRequestError
from openai.types.chat.chat_completion import ChatCompletion, Choice
from openai.types.chat.chat_completion_message_tool_call import ChatCompletionMessageToolCallUnion

from offbook import History
from offbook.base import clock
from offbook.base.errors import ConfigError
from offbook.base.json_files import parse_json
from offbook.base.redaction import error_text
from offbook.base.sync_calls import gather_all
from offbook.base.types import ToolRun
from offbook_mcp.tools.result_values import with_scalars
from offbook_mcp.tools.rollout_tools import RolloutTools, ToolResult, bounded_text
from offbook_mcp.training.argument_score import result_digest

from .rewards import Arguments, EpisodeEnd, PolicyCall, ToolEpisode

LONGEST_ERROR = 1_000
"""The most characters kept of a tool's error."""


@dataclass
class ToolTiming:
    """One tool call. `result` and `seconds` are set when it has ended."""

    result: ToolResult | None = None
    seconds: float = 0.0


@dataclass
class ToolClock:
    """The tool runs with the turn that requested them.

    A run's time includes waiting for other calls to a server that may write. `turn` is the turn of the model's newest
    message, which was sampled after the results of all earlier turns.
    """

    turn: int = 0
    _runs: list[tuple[int, ToolRun]] = field(default_factory=list[tuple[int, ToolRun]])

    @contextmanager
    def timed(self, tool_call_id: str, name: str) -> Generator[ToolTiming]:
        """Time the block, which sets `result`. An exception of the block is stored as the run's error."""
        timing, turn = ToolTiming(), self.turn
        started_at = clock.now()
        raised: str | None = None
        try:
            yield timing
        except BaseException as error:
            raised = error_text(error, LONGEST_ERROR)
            raise
        finally:
            timing.seconds = clock.since(started_at)
            text = timing.result.text if timing.result is not None else None
            reported = text[:LONGEST_ERROR] if timing.result is not None and timing.result.is_error and text else None
            run = ToolRun(
                tool_call_id=tool_call_id,
                name=name,
                started_at=started_at,
                ended_at=started_at + timing.seconds,
                error=raised or reported,
                result=text,
            )
            self._runs.append((turn, run))

    def runs(self) -> list[ToolRun]:
        """The runs in order of their start. Only those whose result the model has not read include the result."""
        runs = [run.model_copy(update={"result": None}) if turn < self.turn else run for turn, run in self._runs]
        return sorted(runs, key=lambda run: run.started_at)


SYSTEM = "Use the tools for what the user asks. Then answer in one short sentence."
"""The system prompt of every rollout, and of the served model."""
_CONTEXT_FULL = "context_length_exceeded"


@dataclass(frozen=True)
class LoopOptions:
    """Options of the loop. Raises ConfigError for `max_turns` below 1.

    max_turns: model requests per task. temperature: None leaves it to the endpoint. max_completion_tokens: per request;
    None leaves it to the endpoint.
    """

    max_turns: int = 8
    temperature: float | None = 1.0
    max_completion_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"max_turns: at least 1 is needed, got {self.max_turns!r}")


@dataclass(frozen=True)
class ToolRecord:
    """One tool call: the arguments as the model wrote them, the result, and the seconds that it took."""

    turn: int
    tool: str
    arguments: str
    result: ToolResult
    seconds: float

    def as_json(self) -> dict[str, object]:
        """The record for a trajectory's metadata, without the result's text, which is in the messages."""
        return {
            "turn": self.turn,
            "tool": self.tool,
            "is_error": self.result.is_error,
            "characters": len(self.result.text),
            "seconds": round(self.seconds, 6),
        }


@dataclass
class AgentLoop:
    """The loop over one model's endpoint and one rollout's tools.

    `records` has every tool call, `clock` their times. The token counts are sums over all requests, as the endpoint reports
    them.
    """

    client: AsyncOpenAI
    model: str
    tools: RolloutTools
    options: LoopOptions = field(default_factory=LoopOptions)
    records: list[ToolRecord] = field(default_factory=list[ToolRecord])
    clock: ToolClock = field(default_factory=ToolClock)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    async def run(self, history: History) -> ToolEpisode:
        """Continue a conversation that ends with the user's message, until the model answers or the turns are used up.

        Appends all messages to `history`. Raises McpServerError, and the OpenAI SDK's errors.
        """
        policy_calls: list[PolicyCall] = []
        for turn in range(1, self.options.max_turns + 1):
            choice = await self._sampled(history)
            if choice is None:
                return ToolEpisode(tuple(policy_calls), "", EpisodeEnd.CONTEXT_FULL, turn - 1)
            history.messages_and_choices.append(choice)
            self.clock.turn = turn
            calls = choice.message.tool_calls or []
            if not calls:
                answer = self.tools.neutral(choice.message.content or "")
                cut_off = choice.finish_reason == "length"
                return ToolEpisode(tuple(policy_calls), answer, EpisodeEnd.ANSWERED, turn, cut_off)
            for call, record in zip(calls, await self._run_calls(calls, turn), strict=True):
                self.records.append(record)
                policy_calls.append(self._as_policy_call(record))
                answered = {"role": "tool", "tool_call_id": call.id, "content": record.result.text}
                history.messages_and_choices.append(cast(Any, answered))
        return ToolEpisode(tuple(policy_calls), "", EpisodeEnd.TURN_LIMIT, self.options.max_turns)

    async def _sampled(self, history: History) -> Choice | None:
        """Sample the model's next message; None if the conversation fills the context."""
        request: dict[str, Any] = {"model": self.model, "messages": history.messages()}
        if functions := self.tools.toolset.functions():
            request["tools"] = functions
        if self.options.temperature is not None:
            request["temperature"] = self.options.temperature
        if self.options.max_completion_tokens is not None:
            request["max_completion_tokens"] = self.options.max_completion_tokens
        try:
            completion: ChatCompletion = await cast(Any, self.client.chat.completions).create(**request)
        except BadRequestError as error:
            if error.code == _CONTEXT_FULL and len(history.messages_and_choices) > 2:
                return None
            raise
        if completion.usage is not None:
            self.prompt_tokens += completion.usage.prompt_tokens
            self.completion_tokens += completion.usage.completion_tokens
        return completion.choices[0]

    async def _run_calls(self, calls: Sequence[ChatCompletionMessageToolCallUnion], turn: int) -> list[ToolRecord]:
        """Run all calls of one message concurrently. `RolloutTools` serialises those to a server that may write."""
        return await gather_all([self._call(call, turn) for call in calls])

    async def _call(self, call: ChatCompletionMessageToolCallUnion, turn: int) -> ToolRecord:
        assert call.type == "function", "requests offer functions only"
        name, written = call.function.name, call.function.arguments
        with self.clock.timed(call.id, name) as timing:
            try:
                result = await self.tools.call(name, written)
            except RecursionError:  # raised by the JSON parser
                result = bounded_text(f"the arguments of {name} are nested too deeply", 1_000, is_error=True)
            timing.result = result
        return ToolRecord(turn, name, written, result, timing.seconds)

    def _as_policy_call(self, record: ToolRecord) -> PolicyCall:
        tool = self.tools.toolset.find(record.tool)
        arguments = parsed(record.arguments) if tool is not None else None
        if tool is None or arguments is None:
            return PolicyCall(record.tool, None, record.turn)
        neutral = cast(
            Arguments,
            with_scalars(arguments, lambda scalar: self.tools.neutral(scalar) if isinstance(scalar, str) else scalar),
        )
        returned = result_digest(self.tools, tool, record.result)
        return PolicyCall(record.tool, neutral, record.turn, record.result.is_error, returned)


def parsed(written: str) -> Arguments | None:
    """Parse the arguments that a model wrote; None if they are not a JSON object."""
    try:
        arguments = parse_json(written or "{}")
    except ValueError:
        return None
    return cast(Arguments, arguments) if isinstance(arguments, dict) else None
