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
from offbook.server.dialects.completions import Completions
from offbook.server.dialects.dialect import Dialect, DialectRequest
from offbook.server.dialects.gemini import Gemini
from offbook.server.dialects.messages import Messages
from offbook.server.dialects.responses import Responses
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
    if dialect is None:
        return _joined_chat(events)
    if isinstance(dialect, Completions):
        return next((event for event in reversed(events) if event.get("usage")), events[-1])
    if isinstance(dialect, Messages):
        return _joined_message(events)
    if isinstance(dialect, Gemini):
        return _joined_gemini(events)
    return next(event["response"] for event in reversed(events) if "response" in event)


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

    async def chat(asked: Answer) -> Answer:
        request = DialectRequest(asked, path, {}, TrajectoryCalls(), recorded)
        return (await dialect.translate(request)).body

    before = await chat(body)
    after = await chat(body | _next_turn(dialect, body, answer))
    said: list[Message] = after["messages"][len(before["messages"]) :]
    if len(said) != 1 or said[0].get("role") != "assistant":
        raise ValueError(f"the answer is {len(said)} messages")
    reason = _reason(answer)
    return _read(before, [(_plain(said[0]), _status(reason), reason)])


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


def _next_turn(dialect: Dialect, body: Answer, answer: Answer) -> Answer:
    """The field of a request that has its conversation, with the answer as its last turn."""
    if isinstance(dialect, Messages):
        return {"messages": [*body["messages"], {"role": "assistant", "content": answer["content"]}]}
    if isinstance(dialect, Gemini):
        content = answer["candidates"][0]["content"]
        return {"contents": [*body["contents"], {"role": "model", "parts": content.get("parts") or [{"text": ""}]}]}
    if not isinstance(dialect, Responses):
        raise ApiError(400, "a completion of a prompt is no conversation", code="no_conversation")
    asked = body["input"]
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return {"input": [*items, *answer["output"]]}


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


def _joined_message(events: list[Answer]) -> Answer:
    """https://docs.claude.com/en/docs/build-with-claude/streaming: deltas of text, thoughts and the JSON of inputs."""
    whole: Answer = {}
    blocks: dict[int, Answer] = {}
    inputs: dict[int, str] = {}
    for event in events:
        kind, index = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            whole = dict(event["message"])
        elif kind == "content_block_start":
            blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta":
            delta = cast(Answer, event["delta"])
            inputs[index] = inputs.get(index, "") + (delta.get("partial_json") or "")
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    blocks[index][name] = (blocks[index].get(name) or "") + delta[name]
        elif kind == "message_delta":
            newer = cast(Answer, event.get("usage") or {})  # cumulative; some servers send 0 for what came first
            usage = {
                **cast(Answer, whole.get("usage") or {}),
                **{name: count for name, count in newer.items() if count},
            }
            whole |= {**event["delta"], "usage": usage}
    for index, block in blocks.items():
        if block.get("type") == "tool_use":
            block["input"] = orjson.loads(inputs.get(index) or "{}")
    return whole | {"content": [blocks[index] for index in sorted(blocks)]}


def _joined_gemini(chunks: list[Answer]) -> Answer:
    parts: list[Answer] = []
    reason: Json = None
    usage: Json = None
    for chunk in chunks:
        usage = chunk.get("usageMetadata") or usage
        for candidate in cast(list[Answer], chunk.get("candidates") or [])[:1]:
            reason = candidate.get("finishReason") or reason
            parts += cast(Answer, candidate.get("content") or {}).get("parts") or []
    content = {"role": "model", "parts": parts}
    return {"candidates": [{"content": content, "finishReason": reason}], "usageMetadata": usage}
