"""What the scripted ASGI applications share: read a request, send a response, serve on a free port. Completions of a prompt
(`/v1/completions`) are answered by what answers chat completions."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from offbook.base.server_sent_events import event
from offbook.openai_dialect.chat_answer import DONE, completion_of

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]
"""A JSON object of a request or response."""
Scope = Body
Receive = Callable[[], Awaitable[Body]]
Send = Callable[[Body], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[Any]]


async def read_body(receive: Receive) -> Body:
    """The JSON object that a request carries; {} where its body is empty."""
    raw, more = b"", True
    while more:
        message = await receive()
        raw, more = raw + message.get("body", b""), message.get("more_body", False)
    return json.loads(raw or b"{}")


async def send_json(send: Send, status: int, body: Body) -> None:
    """A whole response."""
    await start(send, status, "application/json")
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def start(send: Send, status: int, content_type: str) -> None:
    """The head of a response."""
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_event(send: Send, chunk: Body) -> None:
    """One server-sent event of a stream."""
    await send({"type": "http.response.body", "body": event(json.dumps(chunk).encode()), "more_body": True})


async def end_stream(send: Send) -> None:
    """The end of a stream of completions, as OpenAI sends it."""
    await send({"type": "http.response.body", "body": DONE, "more_body": False})


@asynccontextmanager
async def serving(application: Application, config: uvicorn.Config | None = None) -> AsyncGenerator[str]:
    """Serve an ASGI application on a free port of loopback, in this event loop; yields its URL. `config`: of a real listener.

    Idle connections stay open for 75 s, longer than clients keep them, as on the real server."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = config or uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"  # the socket listens already
    finally:
        server.should_exit = True
        await task
        listener.close()


def as_chat(body: Body) -> Body:
    """The request as that of a chat whose only message is the prompt."""
    prompt = body["prompt"]
    shown = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"
    messages = [{"role": "prompt", "content": shown}]
    return body | {"messages": messages, "logprobs": body.get("logprobs") is not None}


def as_completions(send: Send) -> Send:
    """Send the chat completions, and the chunks of one, that are sent with the returned function as completions of a prompt."""

    def written(raw: bytes) -> bytes:
        answer: Body = json.loads(raw)
        return json.dumps(completion_of(answer) if "choices" in answer else answer).encode()

    async def rewriting_send(message: Body) -> None:
        raw: bytes = message.get("body") or b""
        if raw.startswith(b"data: {"):
            message = {**message, "body": event(written(raw.removeprefix(b"data: ")))}
        elif raw.startswith(b"{") and not message.get("more_body"):  # neither [DONE] nor a body that breaks off
            message = {**message, "body": written(raw)}
        await send(message)

    return rewriting_send
