"""One call as an HTTP exchange: sample, record, and only then respond. The answer is a chat completion until it is written.

It runs in its own task. A client that disconnects cancels the task, which frees the engine's slot and records the tokens so
far.
"""

from __future__ import annotations

import asyncio
import logging
import string
from typing import cast
from urllib.parse import quote

import aiohttp
import orjson
from fastapi import Response
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from offbook.base.errors import EngineError, OffbookError, StoreError
from offbook.base.types import Call, Json, new_id
from offbook.base.wire import CALL_HEADER, TRAJECTORY_HEADER
from offbook.openai_dialect.chat_answer import Answer

from ...engine.protocol import TOO_LONG
from ..errors import ApiError, as_api_error, internal_error
from ..models.leases import AdapterLeases
from ..models.registry import ModelRoute
from ..sampler.pool import SamplerCalls
from ..sampler.transport import MAX_ANSWER, Reply, WrongAnswer, read
from .chat_answer import Rendering, replayed, replayed_chunks, shown, split
from .chat_request import LENGTHS, ChatRequest
from .chunk_relay import ChunkRelay
from .recorder import OpenCall, Recorder
from .sampled_answer import EventStream, Sampled, json_object, understood

logger = logging.getLogger(__name__)

TAIL_SECONDS = 10.0
"""How long the sampler's stream may stay open after its last choice finished, for the usage and [DONE]."""
BUSY_CALLS = 8
"""From so many calls in flight on, streams come in blocks of tokens. Fewer streams are sent token by token, as people read them."""
STREAM_BLOCK_TOKENS = 8
_PROMPT_LENGTHS = frozenset({"input_tokens", "input_text"})
"""vLLM's names for the field of a prompt that is too long."""


class ChatExchange(Response):
    """The response to one request. An error is sent as a status before the first byte, and as an event after it."""

    def __init__(
        self,
        request: ChatRequest,
        leases: AdapterLeases,
        sampler: SamplerCalls,
        recorder: Recorder,
        rendering: Rendering | None = None,
    ) -> None:
        """`rendering`: as a chat completion by default."""
        super().__init__()
        self._request = request
        self._rendering = rendering or Rendering()
        self._leases = leases
        self._sampler = sampler
        self._recorder = recorder
        self._opening = b""  # of a stream
        self._started = False
        self._over = False  # sampled and recorded: the rest must not be interrupted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = self._recorder.run(self._serve(scope, receive, send))
        disconnected = asyncio.create_task(until_disconnected(receive))
        try:
            await asyncio.wait({serving, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            if not serving.done() and not self._over:
                serving.cancel()
        if self._over:
            await serving
        elif serving.done() and not serving.cancelled():
            serving.result()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, recorder = self._request, self._recorder
        try:
            async with recorder.turn(request):
                if (earlier := await recorder.earlier(request)) is not None:
                    await self._replay(earlier, send)
                    return
                async with self._leases.lease(request.model) as route:
                    name = request.trajectory_id
                    call = OpenCall(request, name, route.model, route.step) if name is not None else None
                    sampled = Sampled(request.limits)
                    try:
                        with recorder.sampling(call):
                            await self._sample(route, call, sampled, send)
                    except asyncio.CancelledError:
                        if call is not None and not call.settled:
                            await recorder.keep_cancelled(call, sampled)
                        raise
                    except WrongAnswer as error:
                        recorder.wrong_answers += 1
                        if call is not None and not call.settled:
                            await recorder.keep_failed(call, sampled, str(error))
                        raise
                    except StoreError:
                        raise  # recording failed; the client gets this error
                    except Exception as error:
                        if call is not None and not call.settled:
                            await recorder.keep_failed(call, sampled, _reason(error))
                        raise
                    finally:
                        self._over = True
        except OffbookError as error:
            await self._refuse(as_api_error(error), scope, receive, send)
        except Exception as error:  # a stream that has begun must end with an error event, not a broken connection
            logger.exception("chat completion for %r failed", request.model)
            await self._refuse(internal_error(error), scope, receive, send)

    async def _sample(self, route: ModelRoute, call: OpenCall | None, sampled: Sampled, send: Send) -> None:
        busy = self._sampler.in_flight >= BUSY_CALLS
        payload = self._request.payload(route.adapter, STREAM_BLOCK_TOKENS if busy else None)
        try:
            await self._send_on(payload, call, sampled, send)
        except ApiError as error:
            if not self._request.fit or error.param not in LENGTHS or self._started or sampled.choices:
                raise
            await self._send_on(self._request.unlimited(payload), call, sampled, send)

    async def _send_on(self, payload: dict[str, Json], call: OpenCall | None, sampled: Sampled, send: Send) -> None:
        if self._request.stream:
            async with self._sampler.stream(payload, self._request.trajectory_id) as response:
                if response.status != 200:
                    raise _refusal(response.status, await read(response, MAX_ANSWER))
                await self._relay(response, call, sampled, send)
        else:
            reply = await self._sampler.post(payload, sampled.limits.bytes, self._request.trajectory_id)
            await self._whole(reply, call, sampled, send)

    async def _whole(self, reply: Reply, call: OpenCall | None, sampled: Sampled, send: Send) -> None:
        if reply.status != 200:
            raise _refusal(reply.status, reply.content)
        answer = understood(self._request.as_chat, json_object(reply.content))
        understood(sampled.add_answer, answer)
        sampled.check()
        if call is not None:
            kept = await self._recorder.keep(call, sampled)
            await self._send_json(shown(answer, self._request, kept), kept, send)
        else:
            await self._send_json(self._shown(answer), None, send)

    async def _relay(
        self, response: aiohttp.ClientResponse, call: OpenCall | None, sampled: Sampled, send: Send
    ) -> None:
        """Pass chunks on as they arrive. Chunks that finish a choice wait until the call is durable."""
        held: list[Answer] = []
        self._opening = self._rendering.start(_id_of(call))
        # Only a chat completion's chunks are passed on as they are.
        relay = ChunkRelay(self._request, sampled) if type(self._rendering) is Rendering else None
        stream = EventStream(response, sampled.limits.bytes)
        while (events := await stream.next(TAIL_SECONDS if sampled.finished() else None)) is not None:
            ready: list[bytes] = []
            try:
                for raw in events:
                    if relay is not None and (relayed := relay.event(raw)) is not None:
                        ready.append(relayed)
                        continue
                    chunk = understood(self._request.as_chat, json_object(raw))
                    ready += map(self._rendering.feed, await self._take(chunk, call, sampled, held))
                    if relay is not None:
                        relay.learn(raw, chunk)
                if call is not None:
                    call.note_first_token(sampled)
            finally:  # chunks that arrived before an error are sent before it
                await self._send_events(ready, call, send)
        if not sampled.finished():
            raise WrongAnswer(
                f"the sampler's stream ended after {len(sampled.choices)} choices of {self._request.choices}, "
                "not all of them finished"
            )
        await self._end_stream(call, send)

    async def _take(self, chunk: Answer, call: OpenCall | None, sampled: Sampled, held: list[Answer]) -> list[Answer]:
        """Record a chunk. Returns what to send of it and of `held`, which waits for the record."""
        if "error" in chunk:
            raise _engine_error(chunk)
        understood(sampled.add_chunk, chunk)
        if call is not None:
            call.note_first_token(sampled)
        if call is None or call.settled:
            return [self._shown(chunk)]
        going_on, finishing = split(chunk)
        if finishing is not None:
            held.append(finishing)
        ready = [] if going_on is None else [self._shown(going_on)]
        if sampled.finished():
            sampled.check()
            kept = await self._recorder.keep(call, sampled)
            ready += [shown(item, self._request, kept) for item in held]
        return ready

    def _shown(self, answer: Answer) -> Answer:
        return shown(answer, self._request, None)

    async def _replay(self, call: Call, send: Send) -> None:
        if not self._request.stream:
            await self._send_json(replayed(call, self._request), call, send)
            return
        again = OpenCall(self._request, call.trajectory_id, call.model, call.step, call.id)
        self._opening = self._rendering.start(call.id)
        await self._send_events(list(map(self._rendering.feed, replayed_chunks(call, self._request))), again, send)
        await self._end_stream(again, send)

    async def _send_json(self, answer: Answer, call: Call | None, send: Send) -> None:
        body = orjson.dumps(self._rendering.whole(answer, _id_of(call)))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if call is not None:
            headers += _call_headers(call.id, call.trajectory_id)
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._end(body, send)

    async def _end(self, body: bytes, send: Send) -> None:
        # After the last byte, `receive` reports a disconnect, which must not cancel the task.
        self._over = True
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_events(self, events: list[bytes], call: OpenCall | None, send: Send) -> None:
        if not events:
            return
        body = b"".join(events)
        if not self._started:
            headers = [(b"content-type", self._rendering.media_type.encode()), (b"cache-control", b"no-cache")]
            if call is not None:
                headers += _call_headers(call.id, call.trajectory_id)
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            body = self._opening + body
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end_stream(self, call: OpenCall | None, send: Send) -> None:
        await self._send_events([b""], call, send)  # begins a stream of which nothing was sent yet
        await self._end(self._rendering.end(), send)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if error.status >= 500:
            logger.error("chat completion for %r failed: %s", self._request.model, error)
        self._over = True
        if not self._started:
            await JSONResponse(self._rendering.refusal(error), error.status)(scope, receive, send)
        else:
            await self._end(self._rendering.error(error), send)


def _id_of(call: OpenCall | Call | None) -> str:
    return call.id if call is not None else new_id("call")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OffbookError) else str(internal_error(error))


def _call_headers(call_id: str, trajectory_id: str) -> list[tuple[bytes, bytes]]:
    name = quote(trajectory_id, safe=string.punctuation + " ")
    return [(CALL_HEADER.encode(), call_id.encode()), (TRAJECTORY_HEADER.encode(), name.encode())]


async def until_disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        continue


def _refusal(status: int, raw: bytes) -> ApiError | EngineError:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        return _engine_error(cast(Answer, answer), status)
    return EngineError(f"the sampler answered with status {status}: {raw[:500].decode(errors='replace')}")


def _engine_error(answer: Answer, status: int | None = None) -> ApiError | EngineError:
    """Convert the sampler's error: 400, 413, 422 and 429 stay the client's errors, all others become EngineError."""
    content = answer["error"]
    error = cast(dict[str, Json], content) if isinstance(content, dict) else {"message": str(content)}
    message, code = str(error.get("message")), error.get("code")
    status = status or (code if isinstance(code, int) else 500)
    if status in (400, 413, 422, 429) and error.get("param") in _PROMPT_LENGTHS:
        return ApiError(status, message, "messages", TOO_LONG)
    if status in (400, 413, 422, 429):
        return ApiError(status, message, error.get("param"), code if isinstance(code, str) else None)
    return EngineError(f"the sampler answered with status {status}: {message}")
