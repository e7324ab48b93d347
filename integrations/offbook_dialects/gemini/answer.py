"""Chat completions in the format of Gemini's `generateContent`, whole and as the parts of a stream."""

from __future__ import annotations

import base64
from typing import cast

import orjson

from offbook.base.server_sent_events import event
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer
from offbook.openai_dialect.tool_arguments import arguments_object
from offbook.server.calls.chat_answer import Rendering
from offbook.server.calls.sampled_answer import SampledChoice
from offbook.server.errors import ApiError

_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STANDARD = str.maketrans("-_", "+/")
"""From the alphabet of URLs, in which Google's SDK writes base64, to the standard one."""
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    507: "RESOURCE_EXHAUSTED",
}


def error_body(error: ApiError) -> Answer:
    """An error as Google writes it: the HTTP status, a message, its name, and the field at fault.

    >>> error_body(ApiError(404, "no such model"))
    {'error': {'code': 404, 'message': 'no such model', 'status': 'NOT_FOUND'}}
    """
    name = _STATUS.get(error.status, "INTERNAL" if error.status >= 500 else "FAILED_PRECONDITION")
    shown: Answer = {"code": error.status, "message": str(error), "status": name}
    if error.param is not None:
        violation = {"field": error.param, "description": str(error)}
        shown["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}]
    return {"error": shown}


class GeminiAnswer(Rendering):
    """The answers to one request."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = ""
        self._usage: Answer | None = None
        self._choices: dict[int, SampledChoice] = {}

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """A complete answer."""
        self._id = call_id
        candidates = [_candidate(choice) for choice in completion["choices"]]
        return self._frame(candidates) | {"usageMetadata": _usage(completion.get("usage"))}

    def start(self, call_id: str) -> bytes:
        """Nothing precedes the first part."""
        self._id = call_id
        return b""

    def feed(self, chunk: Answer) -> bytes:
        """What is new in a chunk: thoughts and text. Calls, and how a choice ended, are sent at the end."""
        self._usage = chunk.get("usage") or self._usage
        candidates: list[Answer] = []
        for choice in cast(list[Answer], chunk.get("choices") or []):
            index, delta = int(choice["index"]), cast(Answer, choice.get("delta") or {})
            state = self._choices.setdefault(index, SampledChoice(index))
            state.add_delta(delta)
            state.finish(choice.get("finish_reason"))
            if parts := _parts(delta, calls=False):
                candidates.append({"content": {"role": "model", "parts": parts}, "index": index})
        return event(orjson.dumps(self._frame(candidates))) if candidates else b""

    def end(self) -> bytes:
        """The end of a stream: one answer with every choice's calls, finish reason and the usage."""
        candidates: list[Answer] = []
        for index, state in sorted(self._choices.items()):
            message = {"tool_calls": state.message.get("tool_calls")}
            candidates.append(_candidate({"index": index, "message": message, "finish_reason": state.finish_reason}))
        return event(orjson.dumps(self._frame(candidates) | {"usageMetadata": _usage(self._usage)}))

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return event(orjson.dumps(error_body(error)))

    def refusal(self, error: ApiError) -> Answer:
        """The body of an error."""
        return error_body(error)

    def _frame(self, candidates: list[Answer]) -> Answer:
        return {"candidates": candidates, "modelVersion": self._model, "responseId": self._id}


def signature(call_id: str) -> str:
    """What a client sends back with a function call, though it drops the call's id.

    >>> read_signature(signature("call-2"))
    'call-2'
    """
    return base64.b64encode(f"offbook {call_id}".encode()).decode()


def read_signature(text: str | None) -> str:
    """The id of the tool call; empty for a signature of another origin."""
    try:
        mark, _, call_id = base64.b64decode((text or "").translate(_STANDARD)).decode().partition(" ")
    except ValueError:
        return ""
    return call_id if mark == "offbook" else ""


def _candidate(choice: Answer) -> Answer:
    message = cast(Answer, choice["message"])
    parts = _parts(message, calls=True)
    finish = choice.get("finish_reason") or "stop"
    return {
        "content": {"role": "model", "parts": parts or [{"text": ""}]},
        "finishReason": _FINISH.get(finish, "OTHER"),
        "index": choice["index"],
    }


def _parts(message: Answer, *, calls: bool) -> list[Answer]:
    parts: list[Answer] = []
    if thought := message.get("reasoning") or message.get("reasoning_content"):
        parts.append({"text": thought, "thought": True})
    if text := message.get("content"):
        parts.append({"text": text})
    for call in cast(list[Answer], message.get("tool_calls") or []) if calls else ():
        name, raw = call["function"]["name"], call["function"]["arguments"]
        shown = {"id": call["id"], "name": name, "args": arguments_object(raw)}
        parts.append({"functionCall": shown, "thoughtSignature": signature(str(call["id"]))})
    return parts


def _usage(usage: Answer | None) -> Answer:
    counts = usage or {}
    return {
        "promptTokenCount": counts.get("prompt_tokens", 0),
        "candidatesTokenCount": counts.get("completion_tokens", 0),
        "totalTokenCount": counts.get("total_tokens", 0),
    }


class GeminiCount(GeminiAnswer):
    """The number of a prompt's tokens, by a call that samples a single token."""

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The number."""
        tokens: Json = completion["usage"]["prompt_tokens"]
        return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}
