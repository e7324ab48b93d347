"""Answers of OpenAI's dialect as plain JSON values: chat completions and completions of a prompt, whole and as the chunks of a
stream, errors, lists of models."""

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


COMPLETION = "text_completion"
"""The value of `object`, of a whole completion and of a chunk."""
DEFAULT_TOKENS = 16
"""OpenAI's and vLLM's `max_tokens` of a completion without one."""
OF_CHATS = frozenset(
    [
        "top_logprobs",
        "max_completion_tokens",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "include_reasoning",
    ]
)
"""Fields of every sampling request that a completion of a prompt does not have."""


def completion_logprobs(tokens: Iterable[tuple[str, float, Mapping[str, float]]], start: int = 0) -> Answer:
    """The logprobs of tokens: text, logprob and the likeliest tokens. `start`: where the first one begins in the text.

    >>> completion_logprobs([("a", -0.5, {}), ("bc", -1.0, {})], 3)["text_offset"]
    [3, 4]
    """
    known = list(tokens)
    offsets: list[int] = []
    for text, _, _ in known:
        offsets.append(start)
        start += len(text)
    return {
        "tokens": [text for text, _, _ in known],
        "token_logprobs": [logprob for _, logprob, _ in known],
        "top_logprobs": [dict(top) for _, _, top in known],
        "text_offset": offsets,
    }


def completion_of(chat: Answer) -> Answer:
    """A chat completion, or a chunk of one, as the completion of a prompt."""
    ids: Json = chat.get("prompt_token_ids")
    kept = {name: value for name, value in chat.items() if name != "prompt_token_ids"}
    choices = [
        _completion_choice(item) | ({} if ids is None else {"prompt_token_ids": ids}) for item in chat["choices"]
    ]
    return kept | {"object": COMPLETION, "choices": choices}


def _completion_choice(choice: Answer) -> Answer:
    content: Answer = choice.get("message") or choice.get("delta") or {}
    kept = {name: value for name, value in choice.items() if name not in ("message", "delta", "logprobs")}
    logprobs: Answer | None = choice.get("logprobs")
    if logprobs is not None and "content" in logprobs:  # those of a replayed call have the form of chats
        tokens: list[Answer] = logprobs["content"]
        logprobs = completion_logprobs((item["token"], item["logprob"], {}) for item in tokens)
    return kept | {"text": content.get("content") or "", "logprobs": logprobs}


_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorFacts(BaseModel):
    """Why a request was rejected, in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorFacts


def kind_of(status: int) -> str:
    """OpenAI's type of error for an HTTP status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def error_body(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> dict[str, Json]:
    """The body of an error response, and the error event of a stream. `param` names the field at fault.

    OpenAI's `code` is a word for programs; vLLM's is the HTTP status.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ModelCard(BaseModel):
    """A model name that calls may use. `created` is 0 where names appear and disappear."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "offbook"


class ModelCards(BaseModel):
    """The list of model names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
