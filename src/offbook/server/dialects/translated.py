"""Translates the HTTP response of a chat completion to that of another dialect, as it is sent."""

from __future__ import annotations

from typing import Protocol, cast

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from offbook.base.server_sent_events import EVENT_STREAM, EventReader
from offbook.base.types import Json
from offbook.base.wire import CALL_HEADER
from offbook.openai_dialect.chat_answer import Answer


class Rendering(Protocol):
    """The answers to one request, in its dialect."""

    @property
    def media_type(self) -> str:
        """The content type of a stream."""
        ...

    def whole(self, completion: Answer, call_id: str | None) -> Answer:
        """A complete answer. `call_id`: the recorded call; None if it is not recorded."""
        ...

    def start(self, call_id: str | None) -> bytes:
        """The beginning of a stream."""
        ...

    def feed(self, chunk: Answer) -> bytes:
        """A chunk of a stream; empty if there is nothing to send yet."""
        ...

    def end(self) -> bytes:
        """The end of a stream whose choices are all finished."""
        ...

    def broken(self, error: Answer, status: int) -> bytes:
        """The end of a stream that failed. `error`: the field `error` of the body in OpenAI's format."""
        ...

    def refusal(self, error: Answer, status: int) -> Answer:
        """The body of a response with this status, of 400 or above."""
        ...


class Translated(Response):
    """A response in OpenAI's format, translated as it is sent. Status and other headers stay."""

    def __init__(self, response: Response, rendering: Rendering) -> None:
        super().__init__()
        self._response = response
        self._rendering = rendering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(scope, receive, _Translation(self._rendering, send))


class _Translation:
    """The `send` of one response."""

    def __init__(self, rendering: Rendering, send: Send) -> None:
        self._rendering = rendering
        self._send = send
        self._start: Message = {}
        self._call_id: str | None = None
        self._pieces: list[bytes] = []  # of a body that is not streamed
        self._events: EventReader | None = None
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._events is not None:
            body = b"".join(map(self._event, self._events.push(message.get("body", b""))))
            if body or not message.get("more_body"):
                await self._send({**message, "body": body})
        else:
            self._pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._whole()

    async def _begin(self, message: Message) -> None:
        headers = [
            (name, value) for name, value in message["headers"] if name not in (b"content-length", b"content-type")
        ]
        known = dict(message["headers"])
        call_id = known.get(CALL_HEADER.encode())
        self._call_id = None if call_id is None else call_id.decode()
        if not known.get(b"content-type", b"").startswith(EVENT_STREAM.encode()):
            self._start = {**message, "headers": headers}
            return
        self._events = EventReader()
        kind = (b"content-type", f"{self._rendering.media_type}; charset=utf-8".encode())
        await self._send({**message, "headers": [*headers, kind]})
        if opening := self._rendering.start(self._call_id):
            await self._send({"type": "http.response.body", "body": opening, "more_body": True})

    def _event(self, raw: bytes) -> bytes:
        if self._ended:
            return b""
        if raw == b"[DONE]":
            self._ended = True
            return self._rendering.end()
        chunk = cast(Answer, orjson.loads(raw))
        if "error" in chunk:
            self._ended = True
            return self._rendering.broken(chunk["error"], 500)
        return self._rendering.feed(chunk)

    async def _whole(self) -> None:
        answer: Json = orjson.loads(b"".join(self._pieces))
        status = int(self._start["status"])
        shown = (
            self._rendering.refusal(answer["error"], status)
            if status >= 400
            else self._rendering.whole(answer, self._call_id)
        )
        body = orjson.dumps(shown)
        described = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({**self._start, "headers": [*self._start["headers"], *described]})
        await self._send({"type": "http.response.body", "body": body})
