"""The small model's answers to an app's calls, by this server's own endpoints; and its unseen ones in shadow.

An answer is complete before any of it is sent, streams too: whatever fails until then, the paid model answers instead.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import orjson
from starlette.types import ASGIApp, Message, Scope

from offbook.base import clock
from offbook.base.errors import EngineError
from offbook.base.redaction import error_text
from offbook.base.server_sent_events import EventReader
from offbook.base.types import Message as ChatMessage
from offbook.base.wire import LENGTH_HEADER
from offbook.llms.options import Price
from offbook.openai_dialect.chat_answer import Answer

from ..dialects.dialect import Dialect
from ..sampler.sampler import Sampler
from ..upstream.answers import SHAPE_ERRORS, read_call, whole_answer
from ..upstream.threads import position
from ..upstream.traffic import PassedCall, RouteTraffic
from .agreement import agreement
from .inputs import failed_results
from .takeover import Takeover

logger = logging.getLogger(__name__)

_COUNTS = ("/count_tokens", "/input_tokens", ":countTokens")
_KEPT = frozenset({b"content-type", b"accept", b"host", LENGTH_HEADER.encode()})
"""Headers of a client that the small model's request keeps. Its access was checked before."""
SHADOWED = 8
"""Calls that the small model answers unseen at a time. Others are not shown to it."""


@dataclass
class SmallAnswer:
    """What the small model answered, or why it failed: `failure`."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    body: bytes = b""
    failure: str | None = None


class SamplerReadiness:
    """Says whether the small model's sampler is gone, so that no call waits for it, and lets a failed one be started again:
    without calls nobody else would. Without a `sampler` it is not known, and calls find out."""

    def __init__(self) -> None:
        self.sampler: Sampler | None = None
        self._waking: asyncio.Task[None] | None = None

    def gone(self) -> str | None:
        """Why no call would be answered now; None if calls are answered."""
        if self.sampler is None or (state := self.sampler.state) == "ok":
            return None
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake(self.sampler))
        return f"sampler {state}"

    async def _wake(self, sampler: Sampler) -> None:
        with suppress(EngineError):  # its own log says why
            await sampler.ready()


class SmallModel:
    """Asks the small model of a takeover, through the server's application below the gateway."""

    def __init__(self, app: ASGIApp, takeover: Takeover, traffic: RouteTraffic, readiness: SamplerReadiness) -> None:
        self._app = app
        self.takeover = takeover
        self._traffic = traffic
        self._readiness = readiness
        self._shadows: set[asyncio.Task[None]] = set()

    @property
    def price(self) -> Price:
        """USD per million tokens of the small model."""
        plan = self.takeover.state.plan
        return Price(prompt=plan.prompt_price, completion=plan.completion_price)

    def chosen(self, call: PassedCall, path: str) -> bool:
        """Whether a call is the small model's: by its thread's side, and only if it is like those that were seen."""
        takeover = self.takeover
        if not takeover.active or path.endswith(_COUNTS) or call.path.get("model") or call.path.get("trajectory"):
            return False
        small = takeover.asks_small(call.thread)
        number = takeover.state.stage
        if (not small and number > 0) or (body := _object(call.request)) is None:
            return False
        if number == 0 or takeover.seen.few:
            takeover.seen.learn(body, len(call.request))
        if failed := failed_results(body):
            for each in failed:
                takeover.stage.add_result(failed=each)
            takeover.decide()
        if small and (how := takeover.seen.unlike(body, len(call.request))) is not None:
            takeover.stage.add_unlike(how)
            takeover.decide()
            return False
        return small and takeover.active

    async def answer(self, call: PassedCall, path: str, scope: Scope) -> SmallAnswer:
        """The small model's answer within the plan's seconds; at once a failure while its sampler is known to be gone. Never
        raises."""
        if (gone := self._readiness.gone()) is not None:
            return SmallAnswer(failure=gone)
        answer = SmallAnswer()
        try:
            async with asyncio.timeout(self.takeover.state.plan.answer_seconds):
                await self._ask(answer, call, path, scope)
            answer.failure = _failure(answer, call.dialect)
        except TimeoutError:
            answer.failure = "late"
        except Exception as error:  # noqa: BLE001  # whatever fails here, the paid model answers
            logger.warning("takeover of %s: the small model failed: %s", self.takeover.state.route, error_text(error))
            answer.failure = type(error).__name__
        return answer

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

    def shadow(self, call: PassedCall, path: str, scope: Scope) -> None:
        """Let the small model answer a call that the paid model has answered, unseen. Returns at once.

        One call of a thread is chosen, at random: calls of a thread are alike, and the test needs independent ones.
        """
        thread, shadowed = call.thread or call.id, self.takeover.stage.shadowed
        if not self.takeover.shadowing or call.status >= 400 or not call.answer or len(self._shadows) >= SHADOWED:
            return
        if self._readiness.gone() is not None:
            return
        if path.endswith(_COUNTS) or thread in shadowed or position("shadow", thread, call.id) >= 0.5:
            return
        shadowed.add(thread)
        task = asyncio.create_task(self._compare(call, path, scope))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _compare(self, call: PassedCall, path: str, scope: Scope) -> None:
        with self._traffic.step("shadow"):
            takeover = self.takeover
            stage, started = takeover.stage, clock.now()
            answer = await self.answer(call, path, scope)
            seconds = clock.end_of(started) - started
            try:
                body: Answer = orjson.loads(call.request)
                paid = await self._message(call, body, b"".join(call.answer or ()))
                score = 0.0 if answer.failure else agreement(await self._message(call, body, answer.body), paid)
            except SHAPE_ERRORS as error:
                logger.info("takeover of %s: a call cannot be compared: %s", takeover.state.route, error_text(error))
                return
            if stage is takeover.stage and takeover.shadowing:
                stage.add_call(seconds, answer.failure)
                stage.agreement.add(score)
                takeover.decide()

    async def _message(self, call: PassedCall, body: Answer, raw: bytes) -> ChatMessage:
        answer = whole_answer(call.dialect, raw)
        read = await read_call(call.dialect, body, call.path, answer, self._traffic.recorded)
        return read.answers[0][0]


def _object(raw: bytes) -> Answer | None:
    """A request's body; None if it is no JSON object, which is for the provider to refuse."""
    try:
        body: object = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return cast(Answer, body) if isinstance(body, dict) else None


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
