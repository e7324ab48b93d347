"""Builds calls from LangChain's callback events, and conversations from calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import LLMResult

from offbook import History, Trajectory
from offbook.base import clock
from offbook.base.types import (
    Call,
    CallOrigin,
    CallOutput,
    CallStatus,
    Message,
    Sampling,
    Tool,
    new_id,
)
from offbook.client.rollouts.capture import continues, histories_of
from offbook.llms.prices import UsedTokens, used_tokens

from .provider_formats import openai_tools

logger = logging.getLogger(__name__)

FINISHED = {"length": CallStatus.TRUNCATED, "max_tokens": CallStatus.TRUNCATED, "MAX_TOKENS": CallStatus.TRUNCATED}
"""Finish reasons of providers for a truncated answer."""


@dataclass(frozen=True)
class StartedCall:
    """A chat model call that has started. `origin` is None where it is not known."""

    messages: Sequence[BaseMessage]
    tools: tuple[Tool, ...] | None
    origin: CallOrigin | None = None
    started_at: float = field(default_factory=clock.now)

    def ended(
        self,
        trajectory: Trajectory,
        outputs: tuple[CallOutput, ...],
        status: CallStatus,
        *,
        error: str | None = None,
        call_id: str | None = None,
        step: int = 0,
    ) -> Call:
        """Build the finished call. `call_id` and `step` come from the server that recorded it."""
        return Call(
            id=call_id or new_id("call"),
            trajectory_id=trajectory.id,
            model=(self.origin.model if self.origin is not None else None) or "unknown",
            step=step,
            status=status,
            sampling=Sampling(),
            messages=plain(self.messages),
            tools=self.tools,
            prompt_ids=(),
            outputs=outputs,
            origin=self.origin,
            error=error,
            started_at=self.started_at,
            ended_at=clock.end_of(self.started_at),
        )


def started_call(
    messages: Sequence[BaseMessage], event: Mapping[str, Any], origin: CallOrigin | None = None
) -> StartedCall:
    """Build a StartedCall from LangChain's start event."""
    params: dict[str, Any] = event.get("invocation_params") or {}
    tools: list[Tool] = openai_tools(params.get("tools") or [])
    return StartedCall(messages, tuple(tools) or None, origin)


def answers(response: LLMResult) -> list[BaseMessage]:
    """The messages of a response, one per choice."""
    messages = (getattr(generation, "message", None) for generation in (response.generations or [[]])[0])
    return [message for message in messages if isinstance(message, BaseMessage)]


def show(trajectory: Trajectory, calls: list[Call], *, marked: bool) -> None:
    """Write the conversations of these calls on the trajectory.

    `marked` means that an Offbook server recorded the calls under their ids. Messages that the trajectory already has
    (a graph's state) stay. They get the tools and the system messages of the conversation that they continue, and all other
    conversations become additional histories.
    """
    histories = histories_of([call for call in calls if call.outputs], marked=marked)
    if not trajectory.messages_and_choices and histories:
        own, *others = histories
        trajectory.messages_and_choices, trajectory.tools = own.messages_and_choices, own.tools
        trajectory.additional_histories = others
        return
    own = next((history for history in histories if continues(trajectory, _after_system_messages(history))), None)
    if own is not None:
        known = len(own.messages_and_choices) - len(_after_system_messages(own).messages_and_choices)
        trajectory.messages_and_choices[:0] = own.messages_and_choices[:known]
        trajectory.tools = own.tools
    trajectory.additional_histories = [history for history in histories if history is not own]


def _after_system_messages(history: History) -> History:
    roles = [message["role"] for message in history.messages()]
    first = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    return History(messages_and_choices=history.messages_and_choices[first:])


def plain(messages: Sequence[BaseMessage]) -> tuple[Message, ...]:
    """Convert LangChain messages of any provider to OpenAI's format."""
    return tuple(convert_to_openai_messages(list(messages)))


def output_of(index: int, message: BaseMessage) -> CallOutput:
    """Convert one choice of a response."""
    facts: Mapping[str, Any] = message.response_metadata
    reason = facts.get("finish_reason") or facts.get("stop_reason")
    shaped = dict(plain([message])[0]) if isinstance(message, AIMessage) else {"content": str(message.content)}
    if isinstance(shaped.get("content"), list):  # blocks that are not all text
        shaped["content"] = str(message.text)
    calls = bool(shaped.get("tool_calls"))
    return CallOutput(
        index=index,
        token_ids=(),
        logprobs=(),
        message=cast(Message, {name: value for name, value in shaped.items() if name != "role"}),
        finish_reason="length" if reason in FINISHED else "tool_calls" if calls else "stop",
        status=FINISHED.get(str(reason), CallStatus.COMPLETE),
    )


def tokens_of(messages: Sequence[BaseMessage]) -> UsedTokens | None:
    """The tokens as the provider reported them with the first choice; None if it did not, or reported what is no count."""
    usage = next((message.usage_metadata for message in messages if isinstance(message, AIMessage)), None)
    if usage is None:
        return None
    details: Mapping[str, Any] = usage.get("input_token_details") or {}
    lifetimes = {name: details.get(name) or 0 for name in ("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens")}
    written = {"cache_write_tokens": (details.get("cache_creation") or 0) + sum(lifetimes.values())}
    chat = {
        "prompt_tokens": usage["input_tokens"],
        "completion_tokens": usage["output_tokens"],
        "prompt_tokens_details": {"cached_tokens": details.get("cache_read"), **written},
        "cache_creation": lifetimes,
    }
    try:
        return used_tokens({"usage": chat})
    except ValueError as error:
        logger.warning("the tokens of an answer are unknown: %s", error)
        return None
