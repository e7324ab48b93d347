"""What a scripted endpoint receives, and the replies that it can be told to send."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from offbook.base.server_sent_events import EVENT_STREAM
from offbook.openai_dialect import chat_answer
from offbook.openai_dialect.chat_answer import chunks_of, error_body, events, tool_call, wants_usage

Json = dict[str, Any]


@dataclass(frozen=True)
class LlmRequest:
    """One request as it arrived; header names in lower case. A chat completion's body is the JSON that the client sent.

    request.body["model"], request.messages[-1]["content"], request.headers["authorization"]"""

    path: str
    headers: dict[str, str]
    body: Any

    @property
    def messages(self) -> list[Json]:
        """The messages of a chat completion."""
        return self.body["messages"]


@dataclass(frozen=True)
class LlmReply:
    """What the endpoint does with one request. Make one with `says("...")`, `fails(503)` and the other functions.

    - `completion`: a chat completion, sent whole, or in chunks where the request asks for a stream. None: send `content`.
    - `seconds`: wait first. `until`: wait for this event first, 60 s at most.
    - `reset`: break the connection instead of answering."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0
    reset: bool = False
    until: threading.Event | None = None
    completion: Json | None = None

    def body(self, request: LlmRequest) -> tuple[bytes, str]:
        """The bytes that answer a request, and their content type."""
        if self.completion is None:
            return self.content, "application/json"
        completion = {"id": f"chatcmpl-{uuid4().hex}", **self.completion}
        if not request.body.get("stream"):
            return json.dumps(completion).encode(), "application/json"
        chunks = chunks_of(completion, in_halves, with_usage=wants_usage(request.body))
        return b"".join(events(chunks)), EVENT_STREAM


Script = Sequence[LlmReply] | Callable[[LlmRequest], LlmReply]
"""Replies in the order of requests, the last of them for all that follow; or a function, called in the request's thread."""


def says(
    text: str | None,
    *,
    finish_reason: str = "stop",
    usage: tuple[int, int] | None = (10, 5),
    model: str = "scripted",
    seconds: float = 0.0,
    until: threading.Event | None = None,
    **message: Any,
) -> LlmReply:
    """A completion with this text.

        says('{"score": 0.7}', usage=(1_000, 20))

    `usage`: prompt and completion tokens; None: the reply does not tell. `message`: more fields of the message, such as
    `reasoning_content="..."`. `seconds`, `until`: as of `LlmReply`."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": text, **message},
    }
    return _completion([choice], usage, model, seconds, until)


def calls_tool(
    name: str, arguments: str | Mapping[str, Any], *, call_id: str | None = None, **options: Any
) -> LlmReply:
    """A completion with one tool call.

        calls_tool("look_up", {"box": 7})

    `arguments`: a mapping, or raw text that is sent as it is. `call_id`: None makes a new one. `options`: those of `says`."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = tool_call(call_id or f"call-{uuid4().hex[:8]}", name, raw)
    return says(None, finish_reason="tool_calls", tool_calls=[call], **options)


def cuts(text: str) -> LlmReply:
    """A completion that reached its token limit: `finish_reason` is `length`. `cuts('{"score": 0.')`"""
    return says(text, finish_reason="length")


def refuses(reason: str) -> LlmReply:
    """A refusal as OpenAI sends it: no content, `finish_reason` is `stop`. `refuses("I cannot judge this.")`"""
    return says(None, refusal=reason)


def filters() -> LlmReply:
    """A completion that the content filter withheld: `finish_reason` is `content_filter`. `scripted_llm([filters()])`"""
    return says(None, finish_reason="content_filter")


def chooses_nothing() -> LlmReply:
    """A completion without choices. `scripted_llm([chooses_nothing(), says("7")])`"""
    return _completion([], (10, 0), "scripted", 0.0, None)


def fails(
    status: int, message: str = "scripted failure", *, code: str | None = None, headers: Mapping[str, str] | None = None
) -> LlmReply:
    """An error as OpenAI sends it. `fails(429, headers={"retry-after": "1"})`"""
    error = error_body(message, code or "scripted", code=code)
    return LlmReply(json.dumps(error).encode(), status, dict(headers or {}))


def sends(text: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> LlmReply:
    """A body as it is, such as a proxy's page. `sends("<html>Bad gateway</html>", status=502)`"""
    return LlmReply(text.encode(), status, {"content-type": "text/html", **(headers or {})})


def hangs(seconds: float = 60.0) -> LlmReply:
    """No reply for so long; the end of the endpoint's block ends the wait. `scripted_llm([hangs(), says("7")])`"""
    return LlmReply(b"{}", seconds=seconds)


def resets() -> LlmReply:
    """A connection that breaks. `scripted_llm([resets(), says("7")])`"""
    return LlmReply(reset=True)


def in_halves(message: Json) -> Iterator[Json]:
    """A message as deltas: texts and the arguments of tool calls in two halves."""
    yield {"role": "assistant", "content": ""}
    for name, value in message.items():
        if name not in ("role", "tool_calls") and isinstance(value, str):
            yield from ({name: half} for half in _halves(value) if half)
    for index, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        first, second = _halves(function["arguments"])
        yield {"tool_calls": [{**call, "index": index, "function": {**function, "arguments": first}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": second}}]}


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def _completion(
    choices: list[Json], usage: tuple[int, int] | None, model: str, seconds: float, until: threading.Event | None
) -> LlmReply:
    completion: Json = {"object": chat_answer.WHOLE, "created": 0, "model": model, "choices": choices}
    if usage is not None:
        completion["usage"] = chat_answer.usage(*usage)
    return LlmReply(seconds=seconds, until=until, completion=completion)
