"""An inference engine that answers by script in vLLM's dialect, over real HTTP: token ids, logprobs, delays, crashes, omissions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from offbook.base.server_sent_events import EVENT_STREAM
from offbook.openai_dialect.chat_answer import CHUNK, WHOLE, head, tool_call, usage, wants_usage
from offbook.testing.asgi import (
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
    serving,
    start,
)


@dataclass
class ScriptedChoice:
    """One choice of a completion: pieces of text, each with its token ids and logprobs. A stream sends a chunk per piece.

        ScriptedChoice(pieces=("On shelf ", "7."), token_ids=((11, 12), (13,)), logprobs=((-0.1, -0.2), (-0.3,)))

    `tool_call` is a name and raw arguments: the choice is then this call, and a stream sends the pieces as its arguments."""

    pieces: tuple[str, ...] = ("Hel", "lo")
    token_ids: tuple[tuple[int, ...], ...] = ((11, 12), (13,))
    logprobs: tuple[tuple[float | None, ...], ...] = ((-0.1, -0.2), (-0.3,))
    finish_reason: str | None = "stop"
    tool_call: tuple[str, str] | None = None


@dataclass
class ScriptedCompletion:
    """The response to one request.

        ScriptedCompletion(choices=(ScriptedChoice(), ScriptedChoice()), prompt_ids=(1, 2, 3))

    - `gates[i]`: wait for this event before piece `i`; a response that is not streamed waits for `gates[0]`.
    - `dies_after`: break the connection after so many pieces. With `error` a stream sends that error event instead.
    - `omit`: fields to leave out: `prompt_token_ids`, `token_ids`, `logprobs`.
    - `status`: any other than 200 sends `error` as the body."""

    choices: tuple[ScriptedChoice, ...] = (ScriptedChoice(),)
    prompt_ids: tuple[int, ...] = (1, 2, 3)
    gates: dict[int, asyncio.Event] = field(default_factory=dict[int, asyncio.Event])
    dies_after: int | None = None
    omit: frozenset[str] = frozenset()
    status: int = 200
    error: Body | None = None


@dataclass
class ScriptedSampler:
    """An ASGI application with the routes of a vLLM server; `scripted_sampler()` serves one.

    Each request for a completion, of a chat or of a prompt, takes the next of `completions`, and a default `ScriptedCompletion()` once they are
    used up. What arrived is in:

    - `received`: the bodies of these requests, in order.
    - `arrived`, `abandoned`: semaphores, released once per request that arrived or that the client hung up on.
    - `adapters`: the loaded LoRA adapters, name to folder.
    - `control_paths`: requests to `/sleep`, `/release_kv_cache_memory` and `/wake_up`, in order.
    - `sleep_queries`: the query strings of the requests to `/sleep`.

    `healthy` is what `/health` answers, `name` the base model that `/v1/models` lists. `omit_logprobs` and `raw_logprobs`
    make it a vLLM that was started without the options that recording needs. With `keeps_cache`,
    `/release_kv_cache_memory` fails, as it does on a CPU."""

    url: str = ""
    completions: deque[ScriptedCompletion] = field(default_factory=deque[ScriptedCompletion])
    received: list[Body] = field(default_factory=list[Body])
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    control_paths: list[str] = field(default_factory=list[str])
    sleep_queries: list[str] = field(default_factory=list[str])
    keeps_cache: bool = False
    healthy: bool = True
    name: str = "base"
    omit_logprobs: bool = False
    raw_logprobs: bool = False
    abandoned: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    arrived: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path, body = scope["path"], await read_body(receive)
        if path == COMPLETION:
            self.received.append(body)
            await self._complete(as_chat(body), receive, as_completions(send))
        elif path == CHAT and body.get("top_k") == 1 and body.get("max_tokens") == 1:
            await _send_whole(self._probed(), body, send)  # the check that a server makes of its vLLM
        elif path == CHAT:
            self.received.append(body)
            await self._complete(body, receive, send)
        elif path == "/health":
            await send_json(send, 200 if self.healthy else 503, {})
        elif path == "/v1/models":
            listed: list[Body] = [{"id": self.name, "root": "/models/base", "parent": None}]
            await send_json(send, 200, {"data": [{"id": "mine", "parent": self.name}, *listed]})
        else:
            await self._control(path, body, scope["query_string"].decode(), send)

    async def _control(self, path: str, body: Body, query: str, send: Send) -> None:
        if path in ("/sleep", "/release_kv_cache_memory", "/wake_up"):
            self.control_paths.append(path)
            if path == "/sleep":
                self.sleep_queries.append(query)
        elif path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            self.adapters.pop(body["lora_name"], None)
        if path == "/release_kv_cache_memory" and self.keeps_cache:
            await send_json(send, 500, {"error": {"message": "Selective discard is not supported on CPU."}})
        else:
            await send_json(send, 200, {})

    def _probed(self) -> ScriptedCompletion:
        logprob = -0.7 if self.raw_logprobs else 0.0
        omit = frozenset({"logprobs"} if self.omit_logprobs else ())
        return ScriptedCompletion((ScriptedChoice(("x",), ((7,),), ((logprob,),), "length"),), omit=omit)

    async def _complete(self, body: Body, receive: Receive, send: Send) -> None:
        completion = self.completions.popleft() if self.completions else ScriptedCompletion()
        self.arrived.release()
        ended = False

        async def noting_send(message: Body) -> None:
            nonlocal ended
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        response = _stream if body.get("stream") else _send_whole
        answering = asyncio.create_task(response(completion, body, noting_send))
        disconnect = asyncio.ensure_future(receive())
        await asyncio.wait({answering, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        disconnect.cancel()
        if not answering.done() and not ended:
            answering.cancel()
            self.abandoned.release()
        else:
            await answering


@asynccontextmanager
async def scripted_sampler() -> AsyncGenerator[ScriptedSampler]:
    """Serve a `ScriptedSampler` on a free port of loopback, in this event loop, until the block ends. Needs the extra `server`.

        async with scripted_sampler() as sampler, server_over(sampler.url) as url:
            sampler.completions.append(ScriptedCompletion((ScriptedChoice(("7",), ((42,),), ((-0.5,),)),)))

    A server of your own reaches it at `sampler.url`, where it would reach vLLM."""
    sampler = ScriptedSampler()
    async with serving(sampler) as sampler.url:
        yield sampler


async def _stream(completion: ScriptedCompletion, body: Body, send: Send) -> None:
    if completion.status != 200:
        await send_json(send, completion.status, completion.error or {})
        return
    await start(send, 200, EVENT_STREAM)
    opening: Body = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    opened = [{"index": index, **opening} for index in range(len(completion.choices))]
    await send_event(send, _chunk(body, opened) | _prompt(completion, body))
    for position in range(max(len(choice.pieces) for choice in completion.choices)):
        if position in completion.gates:
            await completion.gates[position].wait()
        if completion.dies_after == position:
            if completion.error is None:
                raise RuntimeError("scripted death")
            await send_event(send, {"error": completion.error})
            await end_stream(send)
            return
        for index, choice in enumerate(completion.choices):
            if position < len(choice.pieces):
                await send_event(send, _chunk(body, [_piece(completion, body, index, choice, position)]))
    if completion.dies_after is not None:
        raise RuntimeError("scripted death")
    if wants_usage(body):
        await send_event(send, _chunk(body, []) | {"usage": _usage(completion)})
    await end_stream(send)


async def _send_whole(completion: ScriptedCompletion, body: Body, send: Send) -> None:
    if 0 in completion.gates:
        await completion.gates[0].wait()
    if completion.dies_after is not None:
        await start(send, 200, "application/json")
        await send({"type": "http.response.body", "body": b'{"id": ', "more_body": True})
        raise RuntimeError("scripted death")
    if completion.status != 200:
        await send_json(send, completion.status, completion.error or {})
        return
    choices = [_whole_choice(completion, body, index, choice) for index, choice in enumerate(completion.choices)]
    first = head(WHOLE, "chatcmpl-1", 1, body["model"])
    await send_json(send, 200, {**first, "usage": _usage(completion), "choices": choices} | _prompt(completion, body))


def _whole_choice(completion: ScriptedCompletion, body: Body, index: int, choice: ScriptedChoice) -> Body:
    message: Body = {"role": "assistant", "content": "".join(choice.pieces), "tool_calls": [], "refusal": None}
    if choice.tool_call is not None:
        message["content"] = None
        message["tool_calls"] = [tool_call("call-7", *choice.tool_call)]
    ids = [token for piece in choice.token_ids for token in piece]
    logprobs = [logprob for piece in choice.logprobs for logprob in piece]
    return {"index": index, "message": message, "finish_reason": choice.finish_reason} | _tokens(
        completion, body, ids, logprobs
    )


def _piece(completion: ScriptedCompletion, body: Body, index: int, choice: ScriptedChoice, position: int) -> Body:
    text = choice.pieces[position]
    delta: Body = {"content": text}
    if choice.tool_call is not None:
        part: Body = (
            tool_call("call-7", choice.tool_call[0], text) if position == 0 else {"function": {"arguments": text}}
        )
        delta = {"tool_calls": [{"index": 0, **part}]}
    last = position == len(choice.pieces) - 1
    tokens = _tokens(completion, body, list(choice.token_ids[position]), list(choice.logprobs[position]))
    return {"index": index, "delta": delta, "finish_reason": choice.finish_reason if last else None} | tokens


def _tokens(completion: ScriptedCompletion, body: Body, ids: list[int], logprobs: list[float | None]) -> Body:
    tokens: Body = {"logprobs": None}
    if body.get("return_token_ids") and "token_ids" not in completion.omit:
        tokens["token_ids"] = ids
    if body.get("logprobs") and "logprobs" not in completion.omit:
        content = [
            {"token": "t", "logprob": logprob, "bytes": None, "top_logprobs": list[Any]()} for logprob in logprobs
        ]
        tokens["logprobs"] = {"content": content}
    return tokens


def _chunk(body: Body, choices: list[Body]) -> Body:
    return {**head(CHUNK, "chatcmpl-1", 1, body["model"]), "choices": choices}


def _prompt(completion: ScriptedCompletion, body: Body) -> Body:
    wanted = body.get("return_token_ids") and "prompt_token_ids" not in completion.omit
    return {"prompt_token_ids": list(completion.prompt_ids)} if wanted else {}


def _usage(completion: ScriptedCompletion) -> Body:
    sampled = sum(len(piece) for choice in completion.choices for piece in choice.token_ids)
    return usage(len(completion.prompt_ids), sampled)
