"""An inference engine whose policy is a Python function: text or tool calls, whole or streamed, in vLLM's dialect.

Its tokens are words. The tokens of a completion are those that the completion has in the next prompt. So, as with a real
chat template, a prompt extends the one before exactly when the client sends back what was sampled.
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
from typing import cast

from offbook.base.redaction import error_text
from offbook.base.server_sent_events import EVENT_STREAM
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import CHUNK, WHOLE, error_body, head, tool_call, usage, wants_usage

from .asgi import (
    CHAT,
    COMPLETION,
    Body,
    Receive,
    Scope,
    Send,
    as_chat,
    as_completions,
    end_stream,
    read_body,
    send_event,
    send_json,
    start,
)

LOGPROB = -0.25
"""The logprob of every token."""
END = 1
"""The token that ends a message."""


@dataclass(frozen=True)
class Action:
    """What the policy does in one turn: say a text, call tools, or both.

    Action("It is on shelf 7.")
    Action(calls=(("look_up", '{"box": 7}'),), thought="Box 7?")

    `calls`: a name and raw arguments for each call. The arguments are sent as they are, also where they are no JSON.
    `thought`: what a model that thinks writes first; the message has it in `reasoning`, as with vLLM."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thought: str = ""


PolicyFunction = Callable[[Body], Action]
"""The body of a chat completion request -> what the policy does."""


@dataclass
class PolicySampler:
    """An ASGI application that answers each completion with `policy(body)`; `scripted_server` runs one.

    A completion of a prompt is a chat whose only message, of the role `prompt`, is the prompt.

        server.sampler.refusals.append((400, "the prompt is too long"))

    - `received`: the bodies of completions, in order.
    - `refusals`: statuses and messages; each request takes one, as long as there are any, instead of asking the policy. The
      error names the field `refused_field`.
    - `piece_seconds`: delay between two pieces of a stream.
    - `failures`: what the policy raised. The client gets status 500 with the error's text."""

    policy: PolicyFunction
    url: str = ""
    received: list[Body] = field(default_factory=list[Body])
    refusals: deque[tuple[int, str]] = field(default_factory=deque[tuple[int, str]])
    refused_field: str | None = None
    piece_seconds: float = 0.0
    failures: list[Exception] = field(default_factory=list[Exception])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        body = await read_body(receive)
        if scope["path"] == COMPLETION:
            body, send = as_chat(body), as_completions(send)
        elif scope["path"] != CHAT:
            return await send_json(send, 200, {})
        self.received.append(body)
        refusal = self._refusal(body)
        if refusal is not None:
            return await self._refuse(send, *refusal)
        try:
            action = self.policy(body)
        except Exception as error:  # noqa: BLE001  # the policy is the user's code: whoever runs the sampler raises it
            self.failures.append(error)
            return await self._refuse(send, 500, f"the policy raised {error_text(error)}")
        try:
            completion = PolicyCompletion(body, action)
        except (AttributeError, KeyError, TypeError) as error:  # vLLM's types of a chat refuse such a body, too
            return await self._refuse(send, 400, f"no messages of a chat: {error_text(error)}")
        if not body.get("stream"):
            return await send_json(send, 200, completion.whole())
        await start(send, 200, EVENT_STREAM)
        for chunk in completion.chunks():
            await send_event(send, chunk)
            await asyncio.sleep(self.piece_seconds)
        await end_stream(send)

    async def _refuse(self, send: Send, status: int, message: str) -> None:
        await send_json(send, status, error_body(message, "scripted", self.refused_field, status))

    def _refusal(self, body: Body) -> tuple[int, str] | None:
        contents: list[Json] = [message.get("content") for message in body["messages"]]
        parts = [part for content in contents if isinstance(content, list) for part in cast(list[Json], content)]
        if any(not isinstance(part, dict) or cast(Body, part).get("type") != "text" for part in parts):
            return 400, "the scripted model is not a multimodal model"  # as vLLM says it
        return self.refusals.popleft() if self.refusals else None


class PolicyCompletion:
    """One action as vLLM sends it, for the request `body`."""

    def __init__(self, body: Body, action: Action) -> None:
        self._body = body
        calls = action.calls[:1] if body.get("parallel_tool_calls") is False else action.calls
        self._calls: list[Body] = [tool_call(f"call-{uuid.uuid4().hex[:12]}", name, raw) for name, raw in calls]
        self._text = action.text
        self._thought = action.thought
        self._reason = "tool_calls" if calls else "stop"
        self._prompt = prompt_ids(body)

    def whole(self) -> Body:
        """The response that is not streamed."""
        message: Body = {"role": "assistant", "content": self._text or None, "tool_calls": self._calls, "refusal": None}
        if self._thought:
            message["reasoning"] = self._thought
        ids = [*(token for _, piece in self._deltas() for token in ids_of(piece)), END]
        choice = {"message": message, "finish_reason": self._reason} | self._tokens(ids)
        choices = [{"index": index, **choice} for index in range(self._body.get("n") or 1)]
        used = usage(len(self._prompt), len(ids) * len(choices))
        return {**self._head(WHOLE), "prompt_token_ids": self._prompt, "choices": choices, "usage": used}

    def chunks(self) -> Iterator[Body]:
        """The chunks of a stream."""
        first = self._head(CHUNK)
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield {**first, "prompt_token_ids": self._prompt, "choices": [opening]}
        sampled = 1
        for delta, piece in self._deltas():
            ids = ids_of(piece)
            sampled += len(ids)
            yield {**first, "choices": [{"index": 0, "delta": delta, "finish_reason": None} | self._tokens(ids)]}
        empty: Body = {}
        yield {**first, "choices": [{"index": 0, "delta": empty, "finish_reason": self._reason} | self._tokens([END])]}
        if wants_usage(self._body):
            yield {**first, "choices": [], "usage": usage(len(self._prompt), sampled)}

    def _deltas(self) -> Iterator[tuple[Body, str]]:
        """The completion word by word, each with the text that its tokens stand for."""
        for piece in pieces(self._thought):
            yield {"reasoning": piece}, piece
        for piece in pieces(self._text):
            yield {"content": piece}, piece
        for index, call in enumerate(self._calls):
            name, raw = call["function"]["name"], call["function"]["arguments"]
            function = {"name": name, "arguments": ""}
            yield {"tool_calls": [{**call, "index": index, "function": function}]}, name
            for piece in pieces(raw):
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, piece

    def _tokens(self, ids: list[int]) -> Body:
        content = [
            {"token": str(token), "logprob": LOGPROB, "bytes": None, "top_logprobs": list[Body]()} for token in ids
        ]
        return {
            "token_ids": ids if self._body.get("return_token_ids") else None,
            "logprobs": {"content": content} if self._body.get("logprobs") else None,
        }

    def _head(self, kind: str) -> Body:
        return head(kind, f"chatcmpl-{uuid.uuid4().hex}", 1, self._body["model"])


def prompt_ids(body: Body) -> list[int]:
    """The tokens of a prompt: tools, messages, and the word that opens the completion. Or those of a completion's prompt."""
    if (prompt := body.get("prompt")) is not None:
        return ids_of(prompt) if isinstance(prompt, str) else list(prompt)
    ids = ids_of(json.dumps(body["tools"])) if body.get("tools") else []
    for message in body["messages"]:
        ids += ids_of(f"<{message['role']}>") + ids_of(message.get("reasoning") or "") + ids_of(content_text(message))
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
