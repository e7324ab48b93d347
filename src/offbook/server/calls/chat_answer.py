"""Converts the sampler's response for the client: the requested model name and fields, and the mark of the call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from offbook.base.types import Call, CallOutput, Json
from offbook.openai_dialect.chat_answer import CHUNK, WHOLE, Answer, indexed, usage

from ...engine.protocol import UNKNOWN_LOGPROB
from .chat_request import ChatRequest

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
