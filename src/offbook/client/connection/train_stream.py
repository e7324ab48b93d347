"""Sends a train request and reads its server-sent events; resends it under the same id until the result is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NoReturn

import httpx
from pydantic import ValidationError

from offbook.base.clock import Backoff
from offbook.base.errors import (
    BackendError,
    ServerError,
    TrainError,
    UnreachableError,
)
from offbook.base.server_sent_events import EVENT_STREAM, EventReader
from offbook.base.types import TrainResult
from offbook.base.wire import TrainEvent, TrainRequest

from .http import Api, server_error, unreachable

SILENCE_SECONDS = 60.0
"""After this time without an event or a ping, the connection is closed and reopened."""
LOST_SECONDS = 120.0
"""After this time without any contact, the server counts as lost."""


async def train(
    api: Api,
    request: TrainRequest,
    *,
    on_event: Callable[[TrainEvent], None] | None = None,
    timeout: float | None = None,
    lost_after: float = LOST_SECONDS,
) -> TrainResult:
    """Send one train request and wait for its result.

    A broken stream is resumed by sending the request again: the server applies an id once. Raises TrainError (not applied),
    ServerError (rejected), UnreachableError (no contact for `lost_after` seconds), BackendError (a local server ended),
    TimeoutError (after `timeout` seconds).
    """
    try:
        async with asyncio.timeout(timeout):
            return await _until_result(api, request, on_event or (lambda event: None), lost_after)
    except TimeoutError as error:
        raise TimeoutError(
            f"train request {request.id} gave no result within timeout={timeout} s; the server may still apply it: "
            f"send it again with request_id={request.id!r}"
        ) from error


async def _until_result(
    api: Api, request: TrainRequest, on_event: Callable[[TrainEvent], None], lost_after: float
) -> TrainResult:
    backoff = Backoff(lost_after, longest=5.0)
    seen: set[str] = set()  # a resumed stream repeats its events from the start
    while True:
        broken: httpx.TransportError | ServerError
        try:
            async with aclosing(_events(api, request)) as events:
                async for event in events:
                    backoff.progress()
                    if event is None:
                        continue
                    if event.kind == "result" and event.result is not None:
                        return event.result
                    if event.kind == "error":
                        raise _train_error(event, request)
                    if (text := event.model_dump_json()) not in seen:
                        seen.add(text)
                        on_event(event)
            broken = httpx.RemoteProtocolError("the stream ended before its result")
        except httpx.TransportError as error:
            broken = error
        except ServerError as error:
            if error.status not in (502, 503, 504):
                raise
            broken = error
        try:
            api.alive()
        except BackendError as ended:
            raise BackendError(f"{ended}\n{_send_again(request)}") from ended
        if not await backoff.wait():
            _give_up(api, request, broken)


async def _events(api: Api, request: TrainRequest) -> AsyncGenerator[TrainEvent | None]:
    """The events of one connection; None for a ping."""
    headers = {"content-type": "application/json", "accept": EVENT_STREAM}
    wait = httpx.Timeout(SILENCE_SECONDS, connect=30.0)
    body = request.model_dump_json().encode()
    async with api.http.stream("POST", "/api/train", content=body, headers=headers, timeout=wait) as answer:
        if not answer.is_success:
            await answer.aread()
            raise server_error(api.url, answer)
        reader = EventReader()
        async for piece in answer.aiter_bytes():
            yield None  # also a comment is a sign of life
            for data in reader.push(piece):
                yield _parsed(data, api.url)


def _parsed(data: bytes, url: str) -> TrainEvent:
    try:
        return TrainEvent.model_validate_json(data)
    except ValidationError as error:
        raise ServerError(
            f"{url} sent an event that this version does not know: {data[:500].decode(errors='replace')!r}; install the same version on both sides"
        ) from error


def _train_error(event: TrainEvent, request: TrainRequest) -> TrainError:
    fault = event.error or {}
    message = str(fault.get("message") or event.message or "no reason given")
    return TrainError(
        f"step of {request.model!r} was not applied: {message}", reason=str(fault.get("code") or "failed")
    )


def _give_up(api: Api, request: TrainRequest, broken: httpx.TransportError | ServerError) -> NoReturn:
    reason = str(broken if isinstance(broken, ServerError) else unreachable(api.url, broken))
    raise UnreachableError(f"{reason}; {_send_again(request)}") from broken


def _send_again(request: TrainRequest) -> str:
    return f"train request {request.id} may have been applied: send it again with request_id={request.id!r}"
