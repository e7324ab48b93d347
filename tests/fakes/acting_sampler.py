"""A sampler whose answer is a function of the payload, in vLLM's dialect: whole or in pieces, text or several tool calls.

Its tokens are words, and the tokens of an answer are those that the answer has in the next prompt: as with a real
template, a prompt extends the one before exactly when the client sends back what was sampled.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
LOGPROB = -0.25


@dataclass(frozen=True)
class Act:
    """What the policy does: says something, or calls tools, each with its arguments as raw text."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()


Policy = Callable[[Body], Act]


@dataclass
class ActingSampler:
    """An ASGI application. `received` holds the payloads; `refusals` (status, message) go before the policy, one each.
    `refused_field` is the field that refusals name."""

    policy: Policy
    url: str = ""
    received: list[Body] = field(default_factory=list[Body])
    refusals: deque[tuple[int, str]] = field(default_factory=deque[tuple[int, str]])
    refused_field: str | None = None
    piece_seconds: float = 0.0  # between two pieces of a stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        if scope["path"] != "/v1/chat/completions":
            return await _json(send, 200, {})
        body: Body = json.loads(raw)
        self.received.append(body)
        refusal = self._refusal(body)
        if refusal is not None:
            status, text = refusal
            return await _json(
                send,
                status,
                {"error": {"message": text, "type": "scripted", "code": status, "param": self.refused_field}},
            )
        answer = Answer(body, self.policy(body))
        if not body.get("stream"):
            return await _json(send, 200, answer.whole())
        await _start(send, 200, b"text/event-stream")
        for chunk in answer.chunks():
            await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
            await asyncio.sleep(self.piece_seconds)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _refusal(self, body: Body) -> tuple[int, str] | None:
        parts = [
            part for message in body["messages"] for part in message.get("content") or () if isinstance(part, dict)
        ]
        if any(part["type"] != "text" for part in parts):
            return 400, "the scripted model is not a multimodal model"  # as vLLM says it
        return self.refusals.popleft() if self.refusals else None


class Answer:
    """One act as vLLM sends it."""

    def __init__(self, body: Body, act: Act) -> None:
        self._body = body
        calls = act.calls[:1] if body.get("parallel_tool_calls") is False else act.calls
        self._calls = [
            {"id": f"call-{uuid.uuid4().hex[:12]}", "type": "function", "function": {"name": name, "arguments": raw}}
            for name, raw in calls
        ]
        self._text = act.text
        self._reason = "tool_calls" if calls else "stop"
        self._prompt = prompt_ids(body)

    def whole(self) -> Body:
        message = {"role": "assistant", "content": self._text or None, "tool_calls": self._calls, "refusal": None}
        ids = [*(token for _, piece in self._deltas() for token in ids_of(piece)), END]
        choice = {"message": message, "finish_reason": self._reason} | self._tokens(ids)
        choices = [{"index": index, **choice} for index in range(self._body.get("n") or 1)]
        head = self._head("chat.completion")
        usage = self._usage(len(ids) * len(choices))
        return {**head, "prompt_token_ids": self._prompt, "choices": choices, "usage": usage}

    def chunks(self) -> Iterator[Body]:
        head = self._head("chat.completion.chunk")
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield {**head, "prompt_token_ids": self._prompt, "choices": [first]}
        sampled = 1
        for delta, piece in self._deltas():
            ids = ids_of(piece)
            sampled += len(ids)
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None} | self._tokens(ids)]}
        last = {"index": 0, "delta": {}, "finish_reason": self._reason} | self._tokens([END])
        yield {**head, "choices": [last]}
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self._usage(sampled)}

    def _deltas(self) -> Iterator[tuple[Body, str]]:
        """The answer word by word, each with the text that its tokens stand for."""
        for piece in pieces(self._text):
            yield {"content": piece}, piece
        for index, call in enumerate(self._calls):
            name, raw = call["function"]["name"], call["function"]["arguments"]
            function = {"name": name, "arguments": ""}
            yield {"tool_calls": [{**call, "index": index, "function": function}]}, name
            for piece in pieces(raw):
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, piece

    def _tokens(self, ids: list[int]) -> Body:
        content = [{"token": str(each), "logprob": LOGPROB, "bytes": None, "top_logprobs": []} for each in ids]
        return {
            "token_ids": ids if self._body.get("return_token_ids") else None,
            "logprobs": {"content": content} if self._body.get("logprobs") else None,
        }

    def _usage(self, sampled: int) -> Body:
        prompt = len(self._prompt)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _head(self, kind: str) -> Body:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": 1, "model": self._body["model"]}


END = 1
"""The token that ends a message."""


def prompt_ids(body: Body) -> list[int]:
    """The tokens of a prompt: tools, messages, and the word that opens the answer."""
    ids = ids_of(json.dumps(body["tools"])) if body.get("tools") else []
    for message in body["messages"]:
        ids += [*ids_of(f"<{message['role']}>"), *ids_of(content_text(message))]
        for call in message.get("tool_calls") or ():
            ids += ids_of(call["function"]["name"]) + ids_of(call["function"]["arguments"])
        ids.append(END)
    return ids + ids_of("<assistant>")


def content_text(message: Body) -> str:
    """A message's text, whether it is one string or parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def ids_of(text: str) -> list[int]:
    """One token for each word."""
    return [2 + zlib.crc32(piece.encode()) % 30_000 for piece in pieces(text)]


def pieces(text: str) -> list[str]:
    """Words with the space that follows them."""
    return re.findall(r"\S+\s*|\s+", text)


async def _json(send: Any, status: int, body: Body) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _start(send: Any, status: int, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})


def _event(chunk: Body) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
