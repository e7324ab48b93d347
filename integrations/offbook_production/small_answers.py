"""The small model's answers to an app's calls, by this server's own endpoints.

An answer is complete before any of it is sent, streams too: whatever fails until then, the paid model answers instead.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field

import orjson
from starlette.types import ASGIApp, Message, Scope

from offbook.base.errors import EngineError
from offbook.base.redaction import error_text
from offbook.base.server_sent_events import EventReader
from offbook.base.wire import LENGTH_HEADER
from offbook.server.dialects import Dialect
from offbook.server.sampler.pool import Sampler

from .answers import SHAPE_ERRORS, whole_answer
from .takeover import Takeover
from .traffic import PassedCall

logger = logging.getLogger(__name__)

_KEPT = frozenset({b"content-type", b"accept", b"host", LENGTH_HEADER.encode()})
"""Headers of a client that the small model's request keeps. Its access was checked before."""


@dataclass
class SmallAnswer:
    """What the small model answered, or why it failed: `failure`."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    body: bytes = b""
    failure: str | None = None


class SmallModel:
    """Asks the small model of a takeover, through the server's application below the gateway."""

    def __init__(self, app: ASGIApp, takeover: Takeover, sampler: Sampler) -> None:
        self._app = app
        self.takeover = takeover
        self._sampler = sampler
        self._waking: asyncio.Task[None] | None = None

    def chosen(self, call: PassedCall) -> bool:
        """Whether a call is the small model's. A body that is no JSON object is for the provider to refuse."""
        if not self.takeover.active or call.path.get("model") or call.path.get("trajectory"):
            return False
        try:
            body: object = orjson.loads(call.request)
        except orjson.JSONDecodeError:
            return False
        return isinstance(body, dict) and self.takeover.asks_small(call.thread)

    async def answer(self, call: PassedCall, path: str, scope: Scope) -> SmallAnswer:
        """The small model's answer within the rule's seconds; at once a failure while its sampler is known to be gone. Never
        raises."""
        if (gone := self._gone()) is not None:
            return SmallAnswer(failure=gone)
        answer = SmallAnswer()
        try:
            async with asyncio.timeout(self.takeover.state.rule.answer_seconds):
                await self._ask(answer, call, path, scope)
            answer.failure = _failure(answer, call.dialect)
        except TimeoutError:
            answer.failure = "late"
        except Exception as error:  # noqa: BLE001  # whatever fails here, the paid model answers
            logger.warning("takeover of %s: the small model failed: %s", self.takeover.state.route, error_text(error))
            answer.failure = type(error).__name__
        return answer

    def _gone(self) -> str | None:
        """Why no call would be answered now. Lets a failed sampler be started again: without calls nobody else would."""
        if (state := self._sampler.state) == "ok":
            return None
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())
        return f"sampler {state}"

    async def _wake(self) -> None:
        with suppress(EngineError):  # its own log says why
            await self._sampler.ready()

    async def _ask(self, answer: SmallAnswer, call: PassedCall, path: str, scope: Scope) -> None:
        asked = False
        pieces: list[bytes] = []

        async def receive() -> Message:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # the client's own leaving cancels this task
            asked = True
            return {"type": "http.request", "body": call.request, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], list(message["headers"])
            else:
                pieces.append(message.get("body", b""))

        await self._app(self._scope(path, scope), receive, send)
        answer.body = b"".join(pieces)

    def _scope(self, path: str, scope: Scope) -> Scope:
        below = f"/m/{self.takeover.state.model}{path}"
        headers = [(name, value) for name, value in scope["headers"] if name.lower() in _KEPT]
        query = b"&".join(part for part in scope["query_string"].split(b"&") if not part.startswith(b"key="))
        return {**scope, "path": below, "raw_path": below.encode(), "headers": headers, "query_string": query}


def _failure(answer: SmallAnswer, dialect: Dialect | None) -> str | None:
    """Why an answer cannot be sent: its status, or an error in its stream; None if it can."""
    if answer.status != 200:
        return f"status {answer.status}" if answer.status else "no answer"
    if not answer.body.lstrip().startswith((b"{", b"[")):
        for data in EventReader().push(answer.body + b"\n"):
            if data != b"[DONE]" and {"error"} & orjson.loads(data).keys():
                return "error in its stream"
    try:
        whole = whole_answer(dialect, answer.body)
    except SHAPE_ERRORS:
        return "unreadable"
    return "error in its answer" if whole.get("error") else None
