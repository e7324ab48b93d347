"""A vLLM that computes nothing, on the port it is given: every call waits 50 ms, or the seconds given after the port, then gets
max_tokens equal tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cache

import uvloop
from aiohttp import web

from understudy.engine.protocol import FLAT_LOGPROBS

SECONDS = 0.05
WAIT = web.AppKey("wait", float)


@cache
def answer(tokens: int, flat: bool) -> bytes:
    """A whole chat completion; its one token at the server's first question is certain, as top_k=1 makes it.
    `flat`: logprobs as Understudy's plugin of vLLM gives them when they are asked for so."""
    values = [0.0 if tokens == 1 else -0.5 - i / 7 for i in range(tokens)]
    content = [{"token": f" t{i}", "logprob": v, "bytes": [32, 116], "top_logprobs": []} for i, v in enumerate(values)]
    logprobs = {"content": [], "token_logprobs": values} if flat else {"content": content}
    message = {"role": "assistant", "content": " t" * tokens, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "length"}
    choice |= {"token_ids": list(range(tokens))}
    usage = {"prompt_tokens": 60, "completion_tokens": tokens, "total_tokens": 60 + tokens}
    whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "base", "choices": [choice]}
    return json.dumps(whole | {"usage": usage, "prompt_token_ids": list(range(60))}).encode()


async def chat(request: web.Request) -> web.Response:
    asked = await request.json()
    await asyncio.sleep(SECONDS if asked["max_tokens"] == 1 else request.app[WAIT])
    whole = answer(asked["max_tokens"], FLAT_LOGPROBS in asked.get("vllm_xargs", {}))
    return web.Response(body=whole, content_type="application/json")


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
