"""Reads the sampler's bytes: the events of a stream, and JSON objects. What does not fit is a WrongAnswer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar, cast

import aiohttp
import orjson

from offbook.base.server_sent_events import EventReader
from offbook.base.types import Json

from ..errors import shortened
from ..sampler.answer_limits import WrongAnswer, too_large

logger = logging.getLogger(__name__)
R = TypeVar("R")

WRONG_SHAPE = (AttributeError, KeyError, TypeError, ValueError)
"""What reading a field of an answer raises if the answer has another shape."""


class EventStream:
    """The events of a stream, up to [DONE]."""

    def __init__(self, response: aiohttp.ClientResponse, limit: int) -> None:
        self._content = response.content
        self._limit = limit
        self._size = 0
        self._reader = EventReader()
        self._done = False

    async def next(self, seconds: float | None = None) -> list[bytes] | None:
        """The next events, all that arrived together; None at the end, or after `seconds` without an event.

        Raises WrongAnswer for a stream of more than `limit` bytes.
        """
        if seconds is None:
            return await self._read()
        try:
            return await asyncio.wait_for(self._read(), seconds)
        except TimeoutError:
            logger.warning("The sampler kept a stream open for %.0f s after its last choice; closing it", seconds)
            return None

    async def _read(self) -> list[bytes] | None:
        while not self._done and (piece := await self._content.readany()):
            self._size += len(piece)
            if self._size > self._limit:
                raise too_large(self._limit)
            events = self._reader.push(piece)
            if b"\n" not in piece:
                continue
            if b"[DONE]" in events:
                self._done = True
                del events[events.index(b"[DONE]") :]
            return events
        return None


def json_object(raw: bytes) -> dict[str, Json]:
    """A JSON object of the sampler. Raises WrongAnswer."""
    try:
        answer = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise WrongAnswer(f"the sampler's answer is not JSON: {raw[:200]!r}") from error
    if not isinstance(answer, dict):
        raise WrongAnswer(f"the sampler's answer is not a JSON object: {raw[:200]!r}")
    return cast(dict[str, Json], answer)


def understood(take: Callable[[dict[str, Json]], R], answer: dict[str, Json]) -> R:
    """The result of `take`. Raises WrongAnswer if the answer has another shape than `take` reads."""
    try:
        return take(answer)
    except WRONG_SHAPE as error:
        raise not_understood(error, answer) from error


def not_understood(error: Exception, answer: dict[str, Json]) -> WrongAnswer:
    """The error for an answer of another shape."""
    shape = f"{type(error).__name__}: {error}"
    return WrongAnswer(f"the sampler's answer is not of vLLM's dialect ({shape}): {shortened(answer)}")
