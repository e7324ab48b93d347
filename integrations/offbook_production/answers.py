"""Reads what a paid model answered, after its bytes have been passed on: the answer as a chat message.

A stream is first put together to the whole answer of its API. That answer, as the next turn of the request, is read by the
dialect that reads requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import orjson

from offbook.base.server_sent_events import EventReader
from offbook.base.types import CallStatus, Json, Message, Sampling
from offbook.openai_dialect.chat_answer import Answer
from offbook.server.calls.sampled_answer import Sampled
from offbook.server.calls.sampled_calls import SampledCalls, TrajectoryCalls
from offbook.server.dialects import Dialect, DialectRequest
from offbook.server.errors import ApiError

_CUT = frozenset(
    {"length", "max_tokens", "MAX_TOKENS", "incomplete", "max_output_tokens", "model_context_window_exceeded"}
)


@dataclass(frozen=True)
class ReadCall:
    """A call as a chat: its prompt, the tools it offered, its settings, and one message and status for each choice."""

    messages: tuple[Message, ...]
    tools: tuple[Answer, ...] | None
    sampling: Sampling
    answers: tuple[tuple[Message, CallStatus, str | None], ...]


def whole_answer(dialect: Dialect | None, raw: bytes) -> Answer:
    """The answer as if it had not been streamed; `dialect=None`: a chat completion. Raises one of SHAPE_ERRORS."""
    if raw.lstrip()[:1] == b"{":
        return orjson.loads(raw)
    if raw.lstrip()[:1] == b"[":  # Gemini's stream without alt=sse
        events: list[Answer] = orjson.loads(raw)
    else:
        events = [orjson.loads(data) for data in EventReader().push(raw + b"\n") if data != b"[DONE]"]
    if not events:
        raise ValueError("no event")
    return _joined_chat(events) if dialect is None else dialect.joined(events)


SHAPE_ERRORS = (ApiError, ValueError, LookupError, TypeError, AttributeError, StopIteration)
"""What reading an answer of an unknown shape raises."""


async def read_call(
    dialect: Dialect | None, body: Answer, path: Mapping[str, str | None], answer: Answer, recorded: SampledCalls
) -> ReadCall:
    """A request and its whole answer as a chat. Raises ApiError for what a chat cannot have, and the SHAPE_ERRORS."""
    if dialect is None:
        choices = cast(list[Answer], answer["choices"])
        answers = [(_plain(choice["message"]), choice.get("finish_reason")) for choice in choices]
        return _read(body, [(message, _status(reason), reason) for message, reason in answers])
    if body.get("previous_response_id") or body.get("conversation"):
        raise ApiError(
            400, "its earlier turns are kept by the provider, and are not in the request", code="kept_elsewhere"
        )

    async def chat(request_body: Answer) -> Answer:
        query = {"alt": "sse"}  # without it the dialect refuses Gemini's streams, which the provider has answered
        request = DialectRequest(request_body, path, query, TrajectoryCalls(), recorded)
        return (await dialect.translate(request)).body

    before = await chat(body)
    after = await chat(body | dialect.next_turn(body, answer))
    turns: list[Message] = after["messages"][len(before["messages"]) :]
    if len(turns) != 1 or turns[0].get("role") != "assistant":
        raise ValueError(f"the answer is {len(turns)} messages")
    reason = _reason(answer)
    return _read(before, [(_plain(turns[0]), _status(reason), reason)])


def _read(chat: Answer, answers: list[tuple[Message, CallStatus, str | None]]) -> ReadCall:
    tools = cast(list[Answer] | None, chat.get("tools"))
    settings = {name: chat[name] for name in Sampling.model_fields if chat.get(name) is not None}
    return ReadCall(
        tuple(chat["messages"]),
        None if tools is None else tuple(tools),
        Sampling.model_validate(settings),
        tuple(answers),
    )


def _plain(message: Message) -> Message:
    """The message without empty fields, which providers send and no prompt has."""
    return {name: value for name, value in message.items() if name == "content" or value not in (None, [], "")}


def _status(reason: str | None) -> CallStatus:
    return CallStatus.TRUNCATED if reason in _CUT else CallStatus.COMPLETE


def _reason(answer: Answer) -> str | None:
    """Why a whole answer of Messages, Gemini or Responses ended."""
    candidates = cast(list[Answer], answer.get("candidates") or [{}])
    return answer.get("stop_reason") or candidates[0].get("finishReason") or answer.get("status")


def _joined_chat(chunks: list[Answer]) -> Answer:
    sampled = Sampled()
    usage: Json = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for item in cast(list[Answer], chunk.get("choices") or []):
            choice = sampled.choice(item["index"])
            choice.add_delta(item.get("delta") or {})
            choice.finish(item.get("finish_reason"))
    choices = [
        {"index": index, "message": choice.message, "finish_reason": choice.finish_reason}
        for index, choice in sorted(sampled.choices.items())
    ]
    return {"choices": choices, "usage": usage}
