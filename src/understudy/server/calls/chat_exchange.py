"""One chat completion as an HTTP exchange: sampled, recorded, and only then answered.

It runs in a task of its own: a client that goes away cancels it, which frees the engine's slot and records what came.
"""

from __future__ import annotations

import asyncio
import logging
import string
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar, cast
from urllib.parse import quote

import aiohttp
import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from ...engine.protocol import TOO_LONG
from ...errors import EngineError, StoreError, UnderstudyError
from ...types import Call, Json
from ...wire import CALL_HEADER, TRAJECTORY_HEADER
from ..errors import ApiError, as_api_error, internal_error, shortened
from ..models.leases import AdapterLeases
from ..models.model import ModelRoute
from ..sampler.answer_limits import MAX_ANSWER, WrongAnswer, too_large
from ..sampler.sampler import SamplerCalls
from ..sampler.transport import Reply, read
from .chat_answer import Answer, replayed, replayed_chunks, shown, split
from .chat_request import LENGTHS, ChatRequest
from .recorder import OpenCall, Recorder
from .sampled_answer import Sampled

log = logging.getLogger(__name__)
R = TypeVar("R")

TAIL_SECONDS = 10.0
"""How long a stream may stay open after its last choice has finished: for the usage, and for [DONE]."""
_DONE = b"data: [DONE]\n\n"
_PROMPT_LENGTHS = frozenset({"input_tokens", "input_text"})
"""What vLLM calls the field of a prompt that is too long."""


class ChatExchange(Response):
    """Answers one request. Errors are answered too: as a status before the first byte, as an event after it."""

    def __init__(self, request: ChatRequest, leases: AdapterLeases, sampler: SamplerCalls, recorder: Recorder) -> None:
        super().__init__()
        self._request = request
        self._leases = leases
        self._sampler = sampler
        self._recorder = recorder
        self._started = False
        self._over = False  # sampled and recorded: what is left must not be interrupted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = self._recorder.run(self._serve(scope, receive, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({serving, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
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
                    call = _opened(request, route)
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
        except UnderstudyError as error:
            await self._refuse(as_api_error(error), scope, receive, send)
        except Exception as error:  # a stream that has begun must end in a word, not in a broken connection
            log.exception("chat completion for %r failed", request.model)
            await self._refuse(internal_error(error), scope, receive, send)

    async def _sample(self, route: ModelRoute, call: OpenCall | None, sampled: Sampled, send: Send) -> None:
        payload = self._request.payload(route.adapter)
        try:
            await self._send_on(payload, call, sampled, send)
        except ApiError as error:
            if not self._request.fit or error.param not in LENGTHS or self._started or sampled.choices:
                raise
            without = {name: value for name, value in payload.items() if name not in LENGTHS}
            await self._send_on(without, call, sampled, send)  # up to the end of the context

    async def _send_on(self, payload: dict[str, Json], call: OpenCall | None, sampled: Sampled, send: Send) -> None:
        if self._request.stream:
            async with self._sampler.stream(payload) as response:
                if response.status != 200:
                    raise _refusal(response.status, await read(response, MAX_ANSWER))
                await self._relay(response, call, sampled, send)
        else:
            await self._whole(await self._sampler.post(payload, sampled.limits.bytes), call, sampled, send)

    async def _whole(self, reply: Reply, call: OpenCall | None, sampled: Sampled, send: Send) -> None:
        if reply.status != 200:
            raise _refusal(reply.status, reply.content)
        answer = _object(reply.content)
        _understood(sampled.add_answer, answer)
        sampled.check()
        if call is not None:
            kept = await self._recorder.keep(call, sampled)
            await self._send_json(shown(answer, self._request, kept), kept, send)
        else:
            await self._send_json(self._shown(answer), None, send)

    async def _relay(
        self, response: aiohttp.ClientResponse, call: OpenCall | None, sampled: Sampled, send: Send
    ) -> None:
        """Pass chunks on as they come; those that finish a choice wait until the call is durable."""
        held: list[Answer] = []
        stream = _events(response, sampled.limits.bytes)
        while (events := await _next(stream, TAIL_SECONDS if sampled.finished() else None)) is not None:
            ready: list[Answer] = []
            try:
                await self._take(events, call, sampled, held, ready)
            finally:  # what came before an error is shown before it
                await self._send_chunks(ready, call, send)
        if not sampled.finished():
            raise WrongAnswer(
                f"the sampler's stream ended after {len(sampled.choices)} choices of {self._request.choices}, "
                "not all of them finished"
            )
        await self._end(_DONE, send)

    async def _take(
        self, events: list[bytes], call: OpenCall | None, sampled: Sampled, held: list[Answer], ready: list[Answer]
    ) -> None:
        """Record chunks that arrived together. `ready` receives what may be sent, `held` what waits for the record."""
        for chunk in map(_object, events):
            if "error" in chunk:
                raise _engine_error(chunk)
            _understood(sampled.add_chunk, chunk)
            if call is None or call.settled:
                ready.append(self._shown(chunk))
                continue
            going_on, finishing = split(chunk)
            if going_on is not None:
                ready.append(self._shown(going_on))
            if finishing is not None:
                held.append(finishing)
            if sampled.finished():
                sampled.check()
                kept = await self._recorder.keep(call, sampled)
                ready.extend(shown(item, self._request, kept) for item in held)

    def _shown(self, answer: Answer) -> Answer:
        """An answer that bears no call's mark."""
        return shown(answer, self._request, None)

    async def _replay(self, call: Call, send: Send) -> None:
        if not self._request.stream:
            await self._send_json(replayed(call, self._request), call, send)
            return
        again = OpenCall(self._request, call.trajectory_id, call.model, call.step, call.id)
        await self._send_chunks(list(replayed_chunks(call, self._request)), again, send)
        await self._end(_DONE, send)

    async def _send_json(self, answer: Answer, call: Call | None, send: Send) -> None:
        body = orjson.dumps(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if call is not None:
            headers += _call_headers(call.id, call.trajectory_id)
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._end(body, send)

    async def _end(self, body: bytes, send: Send) -> None:
        # The last byte looks like a disconnect to whoever watches the connection.
        self._over = True
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_chunks(self, chunks: list[Answer], call: OpenCall | None, send: Send) -> None:
        if not chunks:
            return
        if not self._started:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            if call is not None:
                headers += _call_headers(call.id, call.trajectory_id)
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if error.status >= 500:
            log.error("chat completion for %r failed: %s", self._request.model, error)
        self._over = True
        if not self._started:
            await error.response()(scope, receive, send)
        else:
            await self._end(b"data: " + orjson.dumps(error.body()) + b"\n\n" + _DONE, send)


def _opened(request: ChatRequest, route: ModelRoute) -> OpenCall | None:
    if request.trajectory_id is None:
        return None
    return OpenCall(request, request.trajectory_id, route.model, route.step)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UnderstudyError) else str(internal_error(error))


def _call_headers(call_id: str, trajectory_id: str) -> list[tuple[bytes, bytes]]:
    name = quote(trajectory_id, safe=string.punctuation + " ")
    return [(CALL_HEADER.encode(), call_id.encode()), (TRAJECTORY_HEADER.encode(), name.encode())]


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _events(response: aiohttp.ClientResponse, limit: int) -> AsyncGenerator[list[bytes]]:
    """The events of a stream, those that arrived together as one list. Ends at [DONE]. Raises WrongAnswer for a stream
    of more than `limit` bytes."""
    rest: list[bytes] = []  # of a line that has not ended
    size = 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit:
            raise too_large(limit)
        rest.append(piece)
        if b"\n" not in piece:
            continue
        *lines, last = b"".join(rest).split(b"\n")
        rest = [last]
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if b"[DONE]" in events:
            yield [event for event in events[: events.index(b"[DONE]")] if event]
            return
        yield [event for event in events if event]


async def _next(stream: AsyncGenerator[list[bytes]], seconds: float | None) -> list[bytes] | None:
    """The next events; None at the end, and where a stream whose choices are all finished says nothing for `seconds`."""
    try:
        return await asyncio.wait_for(anext(stream), seconds)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        log.warning("The sampler kept a stream open for %.0f s after its last choice; it is ended here", seconds)
        return None


def _object(raw: bytes) -> Answer:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise WrongAnswer(f"the sampler answered what is not JSON: {raw[:200]!r}") from error
    if not isinstance(answer, dict):
        raise WrongAnswer(f"the sampler answered what is no object: {raw[:200]!r}")
    return cast(Answer, answer)


def _understood(take: Callable[[Answer], R], answer: Answer) -> R:
    try:
        return take(answer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        shape = f"{type(error).__name__}: {error}"
        raise WrongAnswer(f"the sampler's answer is not of vLLM's dialect ({shape}): {shortened(answer)}") from error


def _refusal(status: int, raw: bytes) -> ApiError | EngineError:
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        return _engine_error(cast(Answer, answer), status)
    return EngineError(f"the sampler answered with status {status}: {raw[:500].decode(errors='replace')}")


def _engine_error(answer: Answer, status: int | None = None) -> ApiError | EngineError:
    """The sampler's own error: the client's fault stays the client's (400, 413, 422, 429), all else is the engine's."""
    content = answer["error"]
    error = cast(dict[str, Json], content) if isinstance(content, dict) else {"message": str(content)}
    message, code = str(error.get("message")), error.get("code")
    status = status or (code if isinstance(code, int) else 500)
    if status in (400, 413, 422, 429) and error.get("param") in _PROMPT_LENGTHS:
        return ApiError(status, message, "messages", TOO_LONG)
    if status in (400, 413, 422, 429):
        return ApiError(status, message, error.get("param"), code if isinstance(code, str) else None)
    return EngineError(f"the sampler answered with status {status}: {message}")
