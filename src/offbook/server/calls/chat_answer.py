"""How the answer to a call is written: as a chat completion with the requested fields and the mark of the call, or in the API
that the client speaks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import orjson

from offbook.base.server_sent_events import EVENT_STREAM, event
from offbook.base.types import Call, CallOutput, Json
from offbook.openai_dialect.chat_answer import CHUNK, DONE, WHOLE, Answer, indexed, usage

from ...engine.protocol import UNKNOWN_LOGPROB
from ..errors import ApiError
from .chat_request import ChatRequest


class Rendering:
    """The answer to one request, whole or as a stream: a chat completion as it is. An API of another form overrides all of it.

    `call_id`: of the recorded call, else a new id.
    """

    media_type = f"{EVENT_STREAM}; charset=utf-8"

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The complete answer."""
        return completion

    def start(self, call_id: str) -> bytes:
        """The beginning of a stream. It may be empty."""
        return b""

    def feed(self, chunk: Answer) -> bytes:
        """What a chunk of the chat completion adds to the stream. It may be empty."""
        return event(orjson.dumps(chunk))

    def end(self) -> bytes:
        """The end of a stream, after the call is recorded."""
        return DONE

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return event(orjson.dumps(error.body())) + DONE

    def refusal(self, error: ApiError) -> Answer:
        """The body of a response that is an error."""
        return error.body()


Mark = dict[str, Json]


def mark(call: Call, index: int) -> Mark:
    """The `offbook` field of a choice, which identifies the recorded call."""
    return {"trajectory_id": call.trajectory_id, "call_id": call.id, "index": index, "step": call.step}


def shown(answer: Answer, request: ChatRequest, call: Call | None) -> Answer:
    """A response or chunk reduced to the fields that the client requested. With a call, finished choices are marked."""
    seen = {name: value for name, value in answer.items() if name != "prompt_token_ids" or request.wants_token_ids}
    seen["model"] = request.model
    seen["choices"] = [_choice(item, request, call) for item in answer.get("choices") or ()]
    return seen


def split(chunk: Answer) -> tuple[Answer | None, Answer | None]:
    """Split a chunk into its continuing and its finishing choices, as two chunks; None for an empty one."""
    choices = cast(list[Answer], chunk.get("choices") or [])
    finishing = [item for item in choices if item.get("finish_reason") is not None]
    if not finishing:
        return chunk, None
    if len(finishing) == len(choices):
        return None, chunk
    going_on = [item for item in choices if item.get("finish_reason") is None]
    return {**chunk, "choices": going_on}, {**chunk, "choices": finishing}


def replayed(call: Call, request: ChatRequest) -> Answer:
    """The response of a recorded call, for a repeated idempotency key. Its logprobs name tokens as `token_id:N`."""
    choices = [_replayed_choice(output, request) | {"message": output.message} for output in call.outputs]
    return shown(_head(call, WHOLE) | {"choices": choices, "usage": _usage(call)}, request, call)


def replayed_chunks(call: Call, request: ChatRequest) -> Iterator[Answer]:
    """Like `replayed`, as a stream: per choice a chunk with the message and a finishing chunk, then the requested usage."""
    head = _head(call, CHUNK)
    for output in call.outputs:
        delta = dict(output.message)
        if tool_calls := delta.get("tool_calls"):
            delta["tool_calls"] = indexed(tool_calls)
        choice = _replayed_choice(output, request)
        yield shown(head | {"choices": [choice | {"delta": delta, "finish_reason": None}]}, request, call)
        last: Answer = {"index": output.index, "delta": {}, "finish_reason": output.finish_reason}
        yield shown({**head, "prompt_token_ids": None, "choices": [last]}, request, call)
    if request.wants_usage:
        yield shown({**head, "prompt_token_ids": None, "choices": [], "usage": _usage(call)}, request, call)


def _choice(item: Answer, request: ChatRequest, call: Call | None) -> Answer:
    seen = {name: value for name, value in item.items() if name != "token_ids" or request.wants_token_ids}
    if not request.wants_logprobs:
        seen["logprobs"] = None
    if call is not None and item.get("finish_reason") is not None:
        seen["offbook"] = mark(call, int(item["index"]))
    return seen


def _head(call: Call, kind: str) -> Answer:
    return {
        "id": f"chatcmpl-{call.id}",
        "object": kind,
        "created": int(call.started_at),
        "prompt_token_ids": call.prompt_ids,
    }


def _replayed_choice(output: CallOutput, request: ChatRequest) -> Answer:
    choice: Answer = {"index": output.index, "finish_reason": output.finish_reason, "token_ids": output.token_ids}
    if request.wants_logprobs:
        content = [
            {
                "token": f"token_id:{token}",
                "logprob": UNKNOWN_LOGPROB if math.isnan(value) else value,
                "bytes": None,
                "top_logprobs": list[object](),
            }
            for token, value in zip(output.token_ids, output.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    return choice


def _usage(call: Call) -> Answer:
    return usage(len(call.prompt_ids), sum(len(output.token_ids) for output in call.outputs))
