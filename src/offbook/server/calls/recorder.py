"""Records calls: a sampler's answer becomes a Call, and is sent to the client once the Call is durable."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Generator, Set
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from pydantic import ValidationError

from offbook.base import clock
from offbook.base.errors import StoreError
from offbook.base.redaction import Redaction, redact
from offbook.base.types import Call, CallOrigin, CallStatus, new_id

from ..errors import ApiError
from ..records.store import Store
from .chat_request import ChatRequest
from .sampled_answer import Sampled, status_of
from .sampled_calls import SampledCalls

logger = logging.getLogger(__name__)


@dataclass
class OpenCall:
    """A call that is being sampled, with its request, trajectory, model and step.

    `settled` means that its answer was passed to the store, so nothing else may be recorded for it.
    """

    request: ChatRequest
    trajectory_id: str
    model: str
    step: int
    id: str = field(default_factory=lambda: new_id("call"))
    started_at: float = field(default_factory=clock.now)
    first_token_at: float | None = None
    settled: bool = False

    def note_first_token(self, sampled: Sampled) -> None:
        """Keep the time at which the first token of a stream arrived."""
        if self.first_token_at is None and sampled.begun():
            self.first_token_at = clock.end_of(self.started_at)


class Recorder:
    """Writes calls to the store, and serialises calls with the same idempotency key.

    `mark_ids` are the base's special tokens that equal one of CALL_MARKS.
    """

    def __init__(self, store: Store, mark_ids: Set[int] = frozenset()) -> None:
        self._store = store
        self._mark_ids = mark_ids
        self._turns: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.sampled = SampledCalls(store)
        self.wrong_answers = 0
        """Number of the sampler's answers since the start that did not match their request."""
        self.in_flight: Counter[str] = Counter()
        """Number of calls being sampled, by trajectory."""

    async def keep(self, call: OpenCall, sampled: Sampled) -> Call:
        """Record a complete answer. Returns once it is durable. Raises StoreError."""
        return await self._write(call, sampled, CallStatus.FAILED, None)

    async def keep_failed(self, call: OpenCall, sampled: Sampled, reason: str) -> None:
        """Record a call that the engine did not finish, with the tokens so far.

        A store failure is only logged, since the client already gets an error.
        """
        await self._write_or_log(call, sampled, CallStatus.FAILED, reason)

    async def keep_cancelled(self, call: OpenCall, sampled: Sampled) -> None:
        """Record a call whose client disconnected, with the tokens so far. A store failure is only logged."""
        await self._write_or_log(call, sampled, CallStatus.CANCELLED, "the client went away")

    async def earlier(self, request: ChatRequest) -> Call | None:
        """The call that was recorded with the request's idempotency key; None if there is none.

        Raises ApiError 409 if that call had other messages or tools.
        """
        if request.trajectory_id is None or request.idempotency_key is None:
            return None
        call = await self._store.call_with_key(request.trajectory_id, request.idempotency_key)
        if call is not None and (call.messages, call.tools) != (request.messages, request.tools):
            raise ApiError(
                409,
                f"idempotency key {request.idempotency_key!r} belongs to call {call.id}, which had other messages or "
                "tools: use a new key for a new call",
                "idempotency-key",
                "idempotency_key_reused",
            )
        return call

    @contextmanager
    def sampling(self, call: OpenCall | None) -> Generator[None]:
        """Count the call's trajectory as in flight inside the block, so that its calls do not expire."""
        if call is None:
            yield
            return
        self.in_flight[call.trajectory_id] += 1
        try:
            yield
        finally:
            self.in_flight[call.trajectory_id] -= 1
            if not self.in_flight[call.trajectory_id]:
                del self.in_flight[call.trajectory_id]

    @asynccontextmanager
    async def turn(self, request: ChatRequest) -> AsyncGenerator[None]:
        """Wait until no other call with the request's idempotency key runs, and exclude others inside the block."""
        if request.trajectory_id is None or request.idempotency_key is None:
            yield
            return
        key = (request.trajectory_id, request.idempotency_key)
        lock, waiting = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = (lock, waiting + 1)
        try:
            async with lock:
                yield
        finally:
            waiting = self._turns[key][1] - 1
            if waiting:
                self._turns[key] = (lock, waiting)
            else:
                del self._turns[key]

    def run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run the handling of a call as a task that outlives the connection. `drain` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self, deadline: float = 10.0) -> None:
        """Wait for running calls; cancel those that still run after `deadline` seconds, which records them.

        Call it before closing the store.
        """
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline)
        running = tuple(self._tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _write(self, call: OpenCall, sampled: Sampled, unfinished: CallStatus, error: str | None) -> Call:
        request = call.request
        outputs = sampled.outputs(unfinished, self._mark_ids if request.tools else None)
        status = unfinished if error is not None else status_of(outputs)
        record = Call(
            id=call.id,
            trajectory_id=call.trajectory_id,
            model=call.model,
            step=call.step,
            status=status,
            sampling=request.sampling,
            constrained=request.constrained,
            allowed_texts=request.allowed_texts,
            messages=request.messages,
            tools=request.tools,
            prompt_ids=tuple(sampled.prompt_ids or ()),
            outputs=outputs,
            origin=_without_keys(request.origin),
            error=None if error is None else redact(error),
            started_at=call.started_at,
            ended_at=clock.end_of(call.started_at),
            first_token_at=call.first_token_at,
        )
        call.settled = True
        kept = await self._store.add_call(record, request.idempotency_key if status.usable else None)
        self.sampled.add(kept)
        return kept

    async def _write_or_log(self, call: OpenCall, sampled: Sampled, status: CallStatus, reason: str) -> None:
        try:
            try:
                await self._write(call, sampled, status, reason)
            except ValidationError as error:  # the answer cannot be stored, so record the failure without it
                logger.error("call %s: what the sampler answered cannot be recorded: %s", call.id, error)
                await self._write(call, Sampled(), status, reason)
        except StoreError as error:
            logger.error("call %s of trajectory %r is not recorded: %s", call.id, call.trajectory_id, error)


def _without_keys(origin: CallOrigin | None) -> CallOrigin | None:
    """The origin without keys in its tags, which are texts of the app. Its names stay: they identify."""
    if origin is None or not origin.tags:
        return origin
    return origin.model_copy(update={"tags": Redaction().value(origin.tags)})
