"""The answer of a chat completion as a response of OpenAI's Responses API, whole and as a stream's events."""

from __future__ import annotations

import time
from typing import cast

import orjson

from offbook.base.server_sent_events import EVENT_STREAM, event
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer
from offbook.server.calls.chat_answer import Rendering
from offbook.server.errors import ApiError

from .items import (
    Offered,
    call_item,
    output_items,
    reasoning_item,
    response_id,
    text_item,
    text_part,
    thought_of,
)

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "top_p",
    "user",
)
_ERRORS = {429: "rate_limit_exceeded"}


class ResponseAnswer(Rendering):
    """One response. In a stream one item is open at a time; its number is the length of the output."""

    media_type = f"{EVENT_STREAM}; charset=utf-8"

    def __init__(self, body: Answer, model: str, offered: Offered, *, sealed: bool) -> None:
        """`body`: the request, parts of which a response repeats. `sealed`: see `output_items`."""
        self._body = body
        self._model = model
        self._offered = offered
        self._sealed = sealed
        self._call_id = ""
        self._response: Answer = {}
        self._number = -1
        self._item: Answer = {}  # the open one
        self._pieces: list[str] = []  # its text so far
        self._open: str | None = None
        self._calls: list[Answer] = []  # of tools, by the chat's index
        self._call = -1
        self._texts = 0  # text items so far
        self._reason: str | None = None
        self._usage: Answer | None = None

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The response."""
        choice = completion["choices"][0]
        items = output_items(choice["message"], call_id, self._offered, self._sealed)
        response = self._head(call_id) | {"output": items}
        return _closed(response, choice.get("finish_reason"), completion.get("usage"))

    def start(self, call_id: str) -> bytes:
        """The response without output."""
        self._call_id = call_id
        self._response = self._head(call_id)
        return b"".join(self._event(f"response.{kind}", response=self._response) for kind in ("created", "in_progress"))

    def feed(self, chunk: Answer) -> bytes:
        """The events of the choice's delta."""
        self._usage = chunk.get("usage") or self._usage
        events = b""
        for choice in chunk.get("choices") or ():
            delta: Answer = choice.get("delta") or {}
            if thought := thought_of(delta):
                events += self._reasoning(thought)
            if text := delta.get("content"):
                events += self._text(text)
            parts: list[Answer] = delta.get("tool_calls") or []
            for part in parts:
                events += self._call_part(part)
            if choice.get("finish_reason"):
                self._reason = choice["finish_reason"]
        return events

    def end(self) -> bytes:
        """The end of the last item and of the response."""
        events = b""
        if self._open is None and all(item["type"] == "reasoning" for item in self._output):
            events += self._text("")
        events += self._close()
        self._response = _closed(self._response, self._reason, self._usage)
        return events + self._event(f"response.{self._response['status']}", response=self._response)

    def error(self, error: ApiError) -> bytes:
        """The failed response. The open item stays as it is."""
        code = _ERRORS.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
        failed = self._response | {"status": "failed", "error": {"code": code, "message": str(error)}}
        return self._event("response.failed", response=failed)

    def refusal(self, error: ApiError) -> Answer:
        """The body of an error."""
        return error_body(error)

    def _head(self, call_id: str) -> Answer:
        body = self._body
        return {name: body.get(name) for name in _ECHOED} | {
            "id": response_id(call_id, bool(body.get("instructions"))),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "metadata": body.get("metadata") or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "store": body.get("store") is not False,
            "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": "disabled",
            "usage": None,
        }

    @property
    def _output(self) -> list[Answer]:
        return cast(list[Answer], self._response["output"])

    def _reasoning(self, thought: str) -> bytes:
        events = b""
        if self._open != "reasoning":
            events = self._begin(reasoning_item(self._call_id, "", sealed=False, status="in_progress"))
        self._pieces.append(thought)
        return events + self._placed("response.reasoning_text.delta", content_index=0, delta=thought)

    def _text(self, text: str) -> bytes:
        events = b""
        if self._open != "message":
            name = f"msg_{self._call_id}_{self._texts}" if self._texts else f"msg_{self._call_id}"
            self._texts += 1
            events = self._begin(text_item(name, None, "in_progress"))
            events += self._placed("response.content_part.added", content_index=0, part=text_part(""))
        self._pieces.append(text)
        if text:
            events += self._placed("response.output_text.delta", content_index=0, delta=text, logprobs=[])
        return events

    def _call_part(self, part: Answer) -> bytes:
        function: Answer = part.get("function") or {}
        index: int = part.get("index") or 0
        events = b""
        if self._open != "call" or self._call != index:
            self._call = index
            begun = {"id": part.get("id"), "function": {"name": function.get("name") or "", "arguments": ""}}
            events = self._close()
            self._calls.append(begun)
            item = call_item(begun, f"fc_{self._call_id}_{index}", self._offered, "in_progress")
            if item["type"] == "custom_tool_call":
                item["input"] = ""
            events += self._begin(item, "call")
        if text := function.get("arguments"):
            self._pieces.append(text)
            if self._item["type"] == "function_call":
                events += self._placed("response.function_call_arguments.delta", delta=text)
        return events

    def _begin(self, item: Answer, kind: str | None = None) -> bytes:
        events = self._close()
        self._open = kind or item["type"]
        self._item = item
        return events + self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        text, item_id = "".join(self._pieces), self._item["id"]
        self._pieces.clear()
        match self._open:
            case "message":
                item = text_item(item_id, text)
                events = self._placed("response.output_text.done", content_index=0, text=text, logprobs=[])
                events += self._placed("response.content_part.done", content_index=0, part=text_part(text))
            case "reasoning":
                item = reasoning_item(self._call_id, text, self._sealed)
                events = self._placed("response.reasoning_text.done", content_index=0, text=text)
            case _:
                self._calls[-1]["function"]["arguments"] = text
                item = call_item(self._calls[-1], item_id, self._offered)
                events = self._call_done(item)
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return events

    def _call_done(self, item: Answer) -> bytes:
        if item["type"] == "function_call":
            done = "response.function_call_arguments.done"
            return self._placed(done, arguments=item["arguments"], name=item["name"])
        kind = "response.custom_tool_call_input"  # in one piece: the text is inside the arguments' JSON
        return self._placed(f"{kind}.delta", delta=item["input"]) + self._placed(f"{kind}.done", input=item["input"])

    def _placed(self, kind: str, **data: Json) -> bytes:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._output), **data)

    def _event(self, kind: str, **data: Json) -> bytes:
        self._number += 1
        return event(orjson.dumps({"type": kind, "sequence_number": self._number, **data}), kind)


def error_body(error: ApiError) -> Answer:
    """The body of an error. A chat's messages are the `input`."""
    fault = error.body()
    if (error.param or "").startswith("messages"):
        fault["error"]["param"] = "input"
    return fault


def _closed(response: Answer, reason: str | None, usage: Answer | None) -> Answer:
    response = response | {"usage": None if usage is None else _usage(usage)}
    if reason in ("length", "content_filter"):
        cause = "max_output_tokens" if reason == "length" else "content_filter"
        return response | {"status": "incomplete", "incomplete_details": {"reason": cause}}
    return response | {"status": "completed", "completed_at": int(time.time())}


def _usage(usage: Answer) -> Answer:
    prompt: Answer = usage.get("prompt_tokens_details") or {}
    answer: Answer = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": answer.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }
