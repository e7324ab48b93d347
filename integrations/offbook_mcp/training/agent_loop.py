"""A plain agent loop: sample the model, run its tool calls, append the results, until it answers."""

from __future__ import annotations

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

from .rewards import Arguments, EpisodeEnd, PolicyCall, ToolEpisode, result_digest

LONGEST_ERROR = 1_000
"""The most characters kept of a tool's error."""


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


@dataclass
class ToolRecord:
    """One tool call: the arguments as the model wrote them, and the result once it has ended.

    `turn` is that of the message that requested it. `seconds` includes waiting for other calls to a server that may write.
    `raised`: an exception ended it, and the result is its text.
    """

    turn: int
    id: str
    tool: str
    arguments: str
    started_at: float
    seconds: float = 0.0
    result: ToolResult = field(default_factory=lambda: ToolResult(""))
    raised: bool = False

    def as_run(self, *, read: bool) -> ToolRun:
        """The record for the server. A result that the model has read is in its messages."""
        text = self.result.text
        return ToolRun(
            tool_call_id=self.id,
            name=self.tool,
            started_at=self.started_at,
            ended_at=self.started_at + self.seconds,
            error=(text[:LONGEST_ERROR] or None) if self.result.is_error else None,
            result=None if read or self.raised else text,
        )

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

    `records` has every tool call, `turn` is that of the model's newest message. The token counts are sums over all requests,
    as the endpoint reports them.
    """

    client: AsyncOpenAI
    model: str
    tools: RolloutTools
    options: LoopOptions = field(default_factory=LoopOptions)
    records: list[ToolRecord] = field(default_factory=list[ToolRecord])
    turn: int = 0
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
            self.turn = turn
            calls = choice.message.tool_calls or []
            if not calls:
                answer = self.tools.neutral(choice.message.content or "")
                cut_off = choice.finish_reason == "length"
                return ToolEpisode(tuple(policy_calls), answer, EpisodeEnd.ANSWERED, turn, cut_off)
            for call, record in zip(calls, await gather_all([self._call(call) for call in calls]), strict=True):
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

    def tool_runs(self) -> list[ToolRun]:
        """The calls in order of their start. All results but those of the newest turn were read before it was sampled."""
        return [record.as_run(read=record.turn < self.turn) for record in self.records]

    async def _call(self, call: ChatCompletionMessageToolCallUnion) -> ToolRecord:
        """Run a call beside the others of its message. `RolloutTools` serialises those to a server that may write."""
        assert call.type == "function", "requests offer functions only"
        name = call.function.name
        record = ToolRecord(self.turn, call.id, name, call.function.arguments, clock.now())
        self.records.append(record)
        try:
            record.result = await self.tools.call(name, record.arguments)
        except RecursionError:  # raised by the JSON parser
            record.result = bounded_text(f"the arguments of {name} are nested too deeply", 1_000, is_error=True)
        except BaseException as error:
            record.result, record.raised = ToolResult(error_text(error, LONGEST_ERROR), is_error=True), True
            raise
        finally:
            record.seconds = clock.since(record.started_at)
        return record

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
