"""Chat completions in the format of Anthropic's Messages, whole and as a stream's events."""

from __future__ import annotations

from typing import cast

import orjson

from offbook.base.server_sent_events import EVENT_STREAM, event
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer
from offbook.openai_dialect.tool_arguments import arguments_object
from offbook.server.calls.chat_answer import Rendering
from offbook.server.errors import ApiError

from .fields import NO_THREADS

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesAnswer(Rendering):
    """The answer to one request. In a stream one content block is open at a time."""

    media_type = f"{EVENT_STREAM}; charset=utf-8"

    def __init__(self, model: str) -> None:
        self._model = model
        self._call_id = ""
        self._number = -1  # of the open block
        self._open: str | None = None  # its type
        self._tool: int | None = None  # the index of the open tool call
        self._arguments: list[str] = []
        self._last: Answer = {}
        self._usage: Answer = {}

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The complete message."""
        choice = cast(Answer, completion["choices"][0])
        message = cast(Answer, choice["message"])
        content: list[Answer] = []
        if thought := message.get("reasoning") or message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": call_id})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in cast(list[Answer], message.get("tool_calls") or []):
            shown = arguments_object(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": shown})
        usage = _counts(completion.get("usage") or {})
        return {**self._head(call_id), "content": content, **_stop(choice), "usage": usage}

    def start(self, call_id: str) -> bytes:
        """The event message_start."""
        self._call_id = call_id
        return _event("message_start", {"message": {**self._head(call_id), "usage": _counts({})}})

    def feed(self, chunk: Answer) -> bytes:
        """The events of a chunk. A tool call's arguments come at its end: broken JSON would break the client."""
        self._usage = chunk.get("usage") or self._usage
        events = b""
        for choice in cast(list[Answer], chunk.get("choices") or []):
            delta = cast(Answer, choice.get("delta") or {})
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                events += self._delta({"type": "thinking_delta", "thinking": thought})
            if delta.get("content"):
                events += self._block("text", {"type": "text", "text": ""})
                events += self._delta({"type": "text_delta", "text": delta["content"]})
            for part in cast(list[Answer], delta.get("tool_calls") or []):
                events += self._call(part)
            if choice.get("finish_reason") is not None:
                self._last = choice
        return events

    def end(self) -> bytes:
        """The end of the open block, why the answer ended, and message_stop."""
        closing = self._close()
        last = _event("message_delta", {"delta": _stop(self._last), "usage": _counts(self._usage)})
        return closing + last + _event("message_stop", {})

    def error(self, error: ApiError) -> bytes:
        """The event error."""
        return event(orjson.dumps(error_body(error)), "error")

    def refusal(self, error: ApiError) -> Answer:
        """The error in Anthropic's format."""
        return error_body(error)

    def _head(self, call_id: str) -> Answer:
        return {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list[Json](),
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _call(self, part: Answer) -> bytes:
        function, index = cast(Answer, part.get("function") or {}), part.get("index") or 0
        events = b""
        if self._open != "tool_use" or self._tool != index:
            events = self._close()
            self._tool = index
            block: Answer = {
                "type": "tool_use",
                "id": part.get("id") or "",
                "name": function.get("name") or "",
                "input": dict[str, Json](),
            }
            events += self._block("tool_use", block)
        self._arguments.append(function.get("arguments") or "")
        return events

    def _block(self, kind: str, block: Answer) -> bytes:
        if self._open == kind:
            return b""
        closing = self._close()
        self._open, self._number = kind, self._number + 1
        return closing + _event("content_block_start", {"index": self._number, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta({"type": "signature_delta", "signature": self._call_id})
        if self._open == "tool_use":
            raw, self._arguments = "".join(self._arguments), []
            shown = orjson.dumps(arguments_object(raw)).decode()
            events = self._delta({"type": "input_json_delta", "partial_json": shown})
        self._open = None
        return events + _event("content_block_stop", {"index": self._number})

    def _delta(self, delta: Answer) -> bytes:
        return _event("content_block_delta", {"index": self._number, "delta": delta})


class MessagesCount(MessagesAnswer):
    """The number of a prompt's tokens, by a call that samples a single token: exact in every engine and for every template."""

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The number."""
        return {"input_tokens": completion["usage"]["prompt_tokens"]}


def _event(name: str, data: Answer) -> bytes:
    return event(orjson.dumps({"type": name, **data}), name)


def _stop(choice: Answer) -> Answer:
    reason = _STOPS.get(choice.get("finish_reason") or "stop", "end_turn")
    matched = choice.get("stop_reason")
    if isinstance(matched, str) and reason == "end_turn":
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": reason, "stop_sequence": None}


def _counts(usage: Answer) -> Answer:
    cached = cast(Answer, usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (usage.get("prompt_tokens") or 0) - cached),
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def error_body(error: ApiError) -> Answer:
    """An error in Anthropic's format."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    shown: Answer = {"type": kind, "message": str(error)}
    if error.code == NO_THREADS:
        shown["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": shown}
