"""A sampler that answers by script in vLLM's dialect, over real HTTP: ids, logprobs, delays, deaths, omissions."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from understudy.server.sampler.supervised import SupervisedSampler

Body = dict[str, Any]


@dataclass
class Choice:
    """What is sampled: pieces of text (or one tool call), each with its ids and logprobs."""

    pieces: tuple[str, ...] = ("Hel", "lo")
    token_ids: tuple[tuple[int, ...], ...] = ((11, 12), (13,))
    logprobs: tuple[tuple[float | None, ...], ...] = ((-0.1, -0.2), (-0.3,))
    finish_reason: str | None = "stop"
    tool_call: tuple[str, str] | None = None  # name, raw arguments: streamed in the pieces' places


@dataclass
class Turn:
    """One scripted answer. `gates[i]` is awaited before piece `i` (of a whole answer: before it, at 0)."""

    choices: tuple[Choice, ...] = (Choice(),)
    prompt_ids: tuple[int, ...] = (1, 2, 3)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    dies_after: int | None = None  # pieces; the connection breaks then
    omit: frozenset[str] = frozenset()  # prompt_token_ids, token_ids, logprobs
    status: int = 200
    error: Body | None = None  # with status 200 and a stream: an error event after `dies_after` pieces


@dataclass
class ScriptedSampler:
    """`turns` are taken in order, then `Turn()` forever. `received` holds the payloads, `abandoned` counts the calls
    that the gateway hung up on."""

    url: str = ""
    turns: deque[Turn] = field(default_factory=deque)
    received: list[Body] = field(default_factory=list)
    loaded: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)  # /sleep and /wake_up, with their questions
    healthy: bool = True
    name: str = "base"
    omit_logprobs: bool = False
    raw_logprobs: bool = False  # answers the check of a running vLLM as one without --logprobs-mode does
    abandoned: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        path, body = scope["path"], json.loads(raw or b"{}")
        if path == "/v1/chat/completions":
            if body.get("top_k") == 1 and body.get("max_tokens") == 1:
                logprob = -0.7 if self.raw_logprobs else 0.0
                omit = frozenset({"logprobs"} if self.omit_logprobs else ())
                only = Turn((Choice(("x",), ((7,),), ((logprob,),), "length"),), omit=omit)
                await _whole(only, body, send)
                return
            await self._chat(body, receive, send)
            return
        if path == "/health":
            await _answer(send, 200 if self.healthy else 503, {})
            return
        if path == "/v1/models":
            listed: list[Body] = [{"id": self.name, "root": "/models/base", "parent": None}]
            await _answer(send, 200, {"data": [{"id": "mine", "parent": self.name}, *listed]})
            return
        if path in ("/sleep", "/wake_up"):
            self.told.append(path)
        if path == "/v1/load_lora_adapter":
            self.loaded[body["lora_name"]] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            self.loaded.pop(body["lora_name"], None)
        await _answer(send, 200, {})

    async def _chat(self, body: Body, receive: Any, send: Any) -> None:
        self.received.append(body)
        turn = self.turns.popleft() if self.turns else Turn()
        self.asked.release()
        ended = False

        async def noted(message: Body) -> None:
            nonlocal ended
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        work = self._stream(turn, body, noted) if body.get("stream") else _whole(turn, body, noted)
        answering = asyncio.create_task(work)
        gone = asyncio.create_task(receive())
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answering.done() and not ended:
            answering.cancel()
            self.abandoned.release()
        else:
            await answering

    async def _stream(self, turn: Turn, body: Body, send: Any) -> None:
        if turn.status != 200:
            await _answer(send, turn.status, turn.error or {})
            return
        await send(_start(200, b"text/event-stream"))
        await _event(
            send,
            _chunk(
                turn,
                body,
                [
                    {"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    for at in range(len(turn.choices))
                ],
                head=True,
            ),
        )
        for at in range(max(len(choice.pieces) for choice in turn.choices)):
            if at in turn.gates:
                await turn.gates[at].wait()
            if turn.dies_after == at:
                if turn.error is None:
                    raise RuntimeError("scripted death")
                await _event(send, {"error": turn.error})
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
                return
            for index, choice in enumerate(turn.choices):
                if at < len(choice.pieces):
                    await _event(send, _chunk(turn, body, [_piece(turn, body, index, choice, at)]))
        if turn.dies_after is not None:
            raise RuntimeError("scripted death")
        if (body.get("stream_options") or {}).get("include_usage"):
            await _event(send, _chunk(turn, body, []) | {"usage": _usage(turn)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


@asynccontextmanager
async def scripted_sampler() -> AsyncIterator[ScriptedSampler]:
    """Serve a script on a free port until the block ends."""
    sampler = ScriptedSampler()
    async with serving(sampler) as url:
        sampler.url = url
        yield sampler


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application on a free port of this machine, in this event loop; yields its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, timeout_keep_alive=75, ws="none")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # older uvicorn
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done():
            task.result()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listener.close()


class ConnectedSampler(SupervisedSampler):
    """The server's client of a sampler that somebody else started."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._connect(url)
        self._state = "ok"


async def _whole(turn: Turn, body: Body, send: Any) -> None:
    if 0 in turn.gates:
        await turn.gates[0].wait()
    if turn.dies_after is not None:
        await send(_start(200, b"application/json"))
        await send({"type": "http.response.body", "body": b'{"id": ', "more_body": True})
        raise RuntimeError("scripted death")
    if turn.status != 200:
        await _answer(send, turn.status, turn.error or {})
        return
    answer: Body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "usage": _usage(turn),
    }
    answer["choices"] = [_choice(turn, body, index, choice) for index, choice in enumerate(turn.choices)]
    if body.get("return_token_ids") and "prompt_token_ids" not in turn.omit:
        answer["prompt_token_ids"] = list(turn.prompt_ids)
    await _answer(send, 200, answer)


def _choice(turn: Turn, body: Body, index: int, choice: Choice) -> Body:
    message: Body = {"role": "assistant", "content": "".join(choice.pieces), "tool_calls": [], "refusal": None}
    if choice.tool_call is not None:
        message["content"] = None
        message["tool_calls"] = [_tool_call(choice.tool_call)]
    ids = [token for part in choice.token_ids for token in part]
    values = [value for part in choice.logprobs for value in part]
    return {"index": index, "message": message, "finish_reason": choice.finish_reason} | _tokens(
        turn, body, ids, values
    )


def _piece(turn: Turn, body: Body, index: int, choice: Choice, at: int) -> Body:
    delta: Body = {"content": choice.pieces[at]}
    if choice.tool_call is not None:
        part = (
            _tool_call((choice.tool_call[0], choice.pieces[at]))
            if at == 0
            else {"function": {"arguments": choice.pieces[at]}}
        )
        delta = {"tool_calls": [{"index": 0, **part}]}
    last = at == len(choice.pieces) - 1
    tokens = _tokens(turn, body, list(choice.token_ids[at]), list(choice.logprobs[at]))
    return {"index": index, "delta": delta, "finish_reason": choice.finish_reason if last else None} | tokens


def _tokens(turn: Turn, body: Body, ids: list[int], values: list[float | None]) -> Body:
    tokens: Body = {"logprobs": None}
    if body.get("return_token_ids") and "token_ids" not in turn.omit:
        tokens["token_ids"] = ids
    if body.get("logprobs") and "logprobs" not in turn.omit:
        content = [{"token": "t", "logprob": value, "bytes": None, "top_logprobs": []} for value in values]
        tokens["logprobs"] = {"content": content}
    return tokens


def _tool_call(call: tuple[str, str]) -> Body:
    return {"id": "call-7", "type": "function", "function": {"name": call[0], "arguments": call[1]}}


def _chunk(turn: Turn, body: Body, choices: list[Body], *, head: bool = False) -> Body:
    chunk: Body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": body["model"],
        "choices": choices,
    }
    if head and body.get("return_token_ids") and "prompt_token_ids" not in turn.omit:
        chunk["prompt_token_ids"] = list(turn.prompt_ids)
    return chunk


def _usage(turn: Turn) -> Body:
    completion = sum(len(part) for choice in turn.choices for part in choice.token_ids)
    prompt = len(turn.prompt_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _start(status: int, kind: bytes) -> Body:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


async def _answer(send: Any, status: int, body: Body) -> None:
    await send(_start(status, b"application/json"))
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _event(send: Any, chunk: Body) -> None:
    await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode(), "more_body": True})
