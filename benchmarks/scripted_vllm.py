"""A vLLM that computes nothing, on the port it is given: every call waits 50 ms, or the seconds given after the port, then gets
max_tokens equal tokens. `system_fingerprint` is the port. A stream gives them as vLLM's does, one chunk for `stream_interval` tokens, one token every 10 ms."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache
from typing import Any

import uvloop
from aiohttp import web

from offbook.engine.protocol import FLAT_LOGPROBS

SECONDS = 0.05
TOKEN_SECONDS = 0.01
WAIT = web.AppKey("wait", float)


@cache
def answer(tokens: int, flat: bool) -> bytes:
    """A whole chat completion; its one token at the server's first question is certain, as top_k=1 makes it.
    `flat`: logprobs as Offbook's plugin of vLLM gives them when they are asked for so."""
    message = {"role": "assistant", "content": " t" * tokens, "tool_calls": []}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": logprobs(range(tokens), tokens, flat),
        "finish_reason": "length",
    }
    choice |= {"token_ids": list(range(tokens))}
    usage = {"prompt_tokens": 60, "completion_tokens": tokens, "total_tokens": 60 + tokens}
    whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "base", "choices": [choice]}
    whole |= {"system_fingerprint": sys.argv[1]}
    return json.dumps(whole | {"usage": usage, "prompt_token_ids": list(range(60))}).encode()


@cache
def events(tokens: int, flat: bool, interval: int) -> tuple[tuple[int, bytes], ...]:
    """The events of a stream, each with the number of its last token: the role with the prompt, the first token, blocks."""
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    first = event(role, prompt_token_ids=list(range(60)))
    ends = sorted({1, *range(1 + interval, tokens, interval), tokens})
    found = [(0, first)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        ids = range(start, end)
        choice = {"delta": {"content": " t" * len(ids)}, "logprobs": logprobs(ids, tokens, flat)}
        choice |= {"finish_reason": "length" if end == tokens else None, "token_ids": list(ids)}
        found.append((end, event(choice)))
    return tuple(found)


def event(choice: dict[str, Any], **fields: Any) -> bytes:
    head = {"id": "chatcmpl-1b2c3d4e5f60718293a4b5c6d7e8f900", "object": "chat.completion.chunk", "created": 1}
    body = {**head, "model": "base", "choices": [{"index": 0, **choice}], **fields}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def logprobs(ids: range, tokens: int, flat: bool) -> dict[str, Any]:
    values = [0.0 if tokens == 1 else -0.5 - i / 7 for i in ids]
    if flat:
        return {"content": [], "token_logprobs": values}
    named = zip(ids, values, strict=True)
    return {"content": [{"token": f" t{i}", "logprob": v, "bytes": [32, 116], "top_logprobs": []} for i, v in named]}


async def chat(request: web.Request) -> web.StreamResponse:
    asked = await request.json()
    flat = FLAT_LOGPROBS in (asked.get("vllm_xargs") or {})
    tokens = asked.get("max_tokens") or asked["max_completion_tokens"]
    await asyncio.sleep(SECONDS if tokens == 1 else request.app[WAIT])
    if not asked.get("stream"):
        return web.Response(body=answer(tokens, flat), content_type="application/json")
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)
    began = 0
    for end, data in events(tokens, flat, asked.get("stream_interval") or 1):
        await asyncio.sleep((end - began) * TOKEN_SECONDS)
        began = end
        await stream.write(data)
    await stream.write(b"data: [DONE]\n\n")
    return stream


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "base", "root": "scripted"}]})


async def health(request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    app = web.Application()
    app[WAIT] = float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), loop=uvloop.new_event_loop(), access_log=None)


if __name__ == "__main__":
    main()
