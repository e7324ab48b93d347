"""A chat completion, whole and as the chunks of a stream, as plain JSON values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from offbook.base.server_sent_events import event
from offbook.base.types import Json, Message

Answer = dict[str, Json]
"""A completion, a chunk, or a choice of one."""

WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"
"""Values of `object`."""
DONE = event(b"[DONE]")
"""The last event of a stream."""


class ChatChoice(BaseModel):
    """One choice of a chat completion."""

    model_config = ConfigDict(extra="allow")

    index: int
    finish_reason: str | None
    message: dict[str, Json]


class ChatCompletion(BaseModel):
    """A chat completion that is not streamed, in OpenAI's format."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]


def head(kind: str, answer_id: str, created: int, model: str) -> Answer:
    """How a completion or chunk begins. `kind`: WHOLE or CHUNK; `created`: Unix time in seconds."""
    return {"id": answer_id, "object": kind, "created": created, "model": model}


def usage(prompt: int, completion: int) -> Answer:
    """The field `usage`: numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def wants_usage(request: Mapping[str, Json]) -> bool:
    """Whether the body of a request asks a stream for a last chunk with its usage."""
    options: dict[str, Json] = request.get("stream_options") or {}
    return bool(options.get("include_usage"))


def tool_call(call_id: str, name: str, arguments: str) -> Answer:
    """A tool call of a message. `arguments`: the JSON text that the model wrote."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def whole_delta(message: Message) -> Iterator[Answer]:
    """A message as one delta, in which tool calls have their index."""
    delta = dict(message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = indexed(calls)
    yield delta


def indexed(tool_calls: Sequence[Answer]) -> list[Answer]:
    """The tool calls of a message, as a delta has them."""
    return [{"index": index, **call} for index, call in enumerate(tool_calls)]


def chunks_of(
    completion: Answer, deltas: Callable[[Message], Iterable[Answer]] = whole_delta, *, with_usage: bool = False
) -> Iterator[Answer]:
    """A whole completion as the chunks of a stream.

    For each choice those of its message, then one that finishes it; `with_usage`, one with the usage at the end.
    """
    first = {name: completion[name] for name in ("id", "created", "model")} | {"object": CHUNK}
    for choice in completion["choices"]:
        names = {name: choice[name] for name in ("index", "offbook") if name in choice}
        for delta in deltas(choice["message"]):
            yield {**first, "choices": [{**names, "delta": delta, "finish_reason": None}]}
        yield {**first, "choices": [{**names, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if with_usage:
        yield {**first, "choices": [], "usage": completion.get("usage")}


def events(chunks: Iterable[Answer]) -> Iterator[bytes]:
    """A stream: each chunk as an event, then the last one."""
    for chunk in chunks:
        yield event(json.dumps(chunk).encode())
    yield DONE
