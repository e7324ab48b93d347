"""Counts and records the calls that were passed on, behind the answers: nothing here can delay or fail one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

import orjson
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from offbook.base import clock
from offbook.base.redaction import mask_personal, redact
from offbook.base.types import CallStatus, CallTrace, OutputTrace
from offbook.llms.options import Price
from offbook.llms.prices import UsedTokens, cost_of, used_tokens
from offbook.openai_dialect.chat_answer import Answer
from offbook.server.calls.sampled_calls import SampledCalls
from offbook.server.dialects import Dialect
from offbook.server.errors import shown
from offbook.server.records.notes import kept_note, read_note, save_notes
from offbook.server.records.store import Store
from offbook.supervised.masking import Masking

from .answers import ReadCall, read_call, whole_answer
from .options import ProductionOptions
from .threads import Retention, ThreadCall, add_thread_calls, apply_retention, position, trajectory_id
from .upstream import UpstreamModel

logger = logging.getLogger(__name__)

ROUTE_NOTE = "route:"
"""Before a route's name, the key of the note of what was counted of it."""
WAITING_CALLS, WAITING_BYTES = 2_000, 64 * 2**20
"""Calls, and bytes of their texts, that wait to be read. Beyond that they are counted, and neither read nor recorded."""
GATHER_SECONDS, GATHERED_CALLS = 0.1, 64
"""How long calls gather before they are read, and how many are then written in one transaction. An app's calls come in bursts:
reading waits until a burst is answered."""
SAVE_SECONDS = 10.0
"""Interval at which the counts are stored."""
RETENTION_SECONDS = 600.0
CLOSE_SECONDS = 5.0


Count = Annotated[int, Field(ge=0)]


class RouteCounts(BaseModel):
    """Sums over all calls of an app. `failed`: the upstream's status was 400 or more, or it could not be reached. `cost` is in USD.

    `uncounted` calls did not say their tokens; `unpriced` had tokens, and no known price. `not_recorded`: calls of recorded
    threads that could not be recorded, by reason. `failed_steps`: failures of this server's own that no call noticed, by step.
    """

    calls: Count = 0
    failed: Count = 0
    cancelled: Count = 0
    uncounted: Count = 0
    unpriced: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    cost: FiniteFloat = Field(default=0.0, ge=0)
    recorded: Count = 0
    not_recorded: dict[str, Count] = Field(default_factory=dict)
    failed_steps: dict[str, Count] = Field(default_factory=dict)

    def add(self, status: int, *, cancelled: bool) -> None:
        """Count a call."""
        self.calls += 1
        self.cancelled += cancelled
        self.failed += not cancelled and status >= 400

    def spend(self, used: UsedTokens, price: Price | None) -> float | None:
        """Add a call's tokens; returns its cost in USD, None if the price is unknown."""
        cost = None if price is None else cost_of(used, price)
        self.prompt_tokens += used.prompt
        self.cached_tokens += used.cached
        self.completion_tokens += used.completion
        self.unpriced += cost is None
        self.cost += cost or 0.0
        return cost

    def skip(self, reason: str) -> None:
        """Count a call of a recorded thread that was not recorded."""
        self.not_recorded[reason] = self.not_recorded.get(reason, 0) + 1


def stored_counts(text: str) -> RouteCounts | None:
    """The counts of a stored text; None for one that does not read back, as of a version that believed every number."""
    try:
        return RouteCounts.model_validate_json(text)
    except ValidationError:
        return None


class RouteState(RouteCounts):
    """An app whose calls pass through to a paid model, with its counts."""

    name: str
    upstream: str
    record_share: float


@dataclass
class PassedCall:
    """A call whose answer has been sent. `trajectory_id=None`: it is not recorded. `answer=None`: too large to be read.
    `counted=False`: no call of a model, such as a list of models. `small`: the model of this server that answered; its calls are
    in the takeover's numbers, and not in the sums of what is paid. `target`: the URL at the upstream."""

    id: str
    dialect: Dialect | None
    path: Mapping[str, str | None]
    request: bytes
    thread: str | None = None
    trajectory_id: str | None = None
    started_at: float = field(default_factory=clock.now)
    first_at: float | None = None
    ended_at: float = 0.0
    status: int = 0
    cancelled: bool = False
    streamed: bool = False
    counted: bool = True
    small: str | None = None
    answer: list[bytes] | None = field(default_factory=list[bytes])
    target: str = ""

    @property
    def size(self) -> int:
        """Bytes of its texts."""
        return len(self.request) + sum(map(len, self.answer or ()))


class RouteTraffic:
    """Counts an app's calls, and records those of chosen threads. Needs a running event loop; `close` ends it."""

    def __init__(
        self, options: ProductionOptions, upstream: UpstreamModel, store: Store, recorded: SampledCalls
    ) -> None:
        self.name = options.route
        self.upstream = upstream
        self.options = options
        self.counts = RouteCounts()
        self._store = store
        self._recorded = recorded
        self._queue: asyncio.Queue[PassedCall] = asyncio.Queue()
        self._waiting = 0
        self._queued = self._settled = 0
        self._key = ROUTE_NOTE + self.name
        self._warned: set[str] = set()
        self._tasks = [asyncio.create_task(work) for work in (self._read_all(), self._save_all(), self._retain())]

    @property
    def run(self) -> str:
        """The run that all threads of the app are recorded in."""
        return f"route/{self.name}"

    async def open(self) -> None:
        """Go on from the stored counts; those that do not read back begin anew. Raises StoreError."""
        text = await self._store.read(lambda connection: read_note(connection, self._key))
        if text is not None and (counts := stored_counts(text)) is not None:
            self.counts = counts
        elif text is not None:
            await self._store.write(save_notes, kept_note(self._key, text))
            logger.error("route %s: its stored counts do not read back, and begin anew", self.name)

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """Run what only this server needs of a call. What it raises is counted, and logged once: it can fail no call."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever fails here, the paid model answers
            self.counts.failed_steps[name] = self.counts.failed_steps.get(name, 0) + 1
            self._warn(
                f"step {name} {type(error).__name__}",
                f"its own step {name!r} failed, and its calls go on: {shown(error)}",
            )

    def _warn(self, reason: str, text: str) -> None:
        """Log the first warning with this reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("route %s: %s", self.name, text)

    def note(self, call: PassedCall) -> None:
        """Count a call, and queue it to be read. Returns at once."""
        if call.small is None:
            self.counts.add(call.status, cancelled=call.cancelled)
        if call.cancelled or call.status >= 400 or call.answer is None:
            reason = "failed" if call.answer is not None else "too large"
        elif self._queue.qsize() >= WAITING_CALLS or self._waiting + call.size > WAITING_BYTES:
            reason = "overload"
        else:
            self._waiting += call.size
            self._queued += 1
            self._queue.put_nowait(call)
            return
        self.counts.uncounted += call.small is None
        if call.trajectory_id is not None:
            self.counts.skip(reason)

    def place(self, call: PassedCall) -> None:
        """Choose by its thread whether a call is recorded, and where."""
        name = call.thread or call.id
        if position("record", self.name, name) < self.options.record_share:
            call.trajectory_id = trajectory_id(self.name, name)
            call.id = f"{call.trajectory_id}.{call.id.removeprefix('call-')[:16]}"

    async def settled(self) -> None:
        """Wait until the calls that are queued now are read and recorded, whatever comes after them."""
        queued = self._queued
        while self._settled < queued:
            await asyncio.sleep(GATHER_SECONDS / 5)

    async def close(self) -> None:
        """Read and record what is queued, for at most CLOSE_SECONDS, and store the counts."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.settled()
                await self._save()
        except Exception as error:  # noqa: BLE001  # a server ends whatever its records do
            logger.error(
                "route %s: %d calls are not recorded: %s", self.name, self._queued - self._settled, shown(error)
            )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read_all(self) -> None:
        while True:
            calls = [await self._queue.get()]
            if self._queue.qsize() < GATHERED_CALLS - 1:
                await asyncio.sleep(GATHER_SECONDS)
            while len(calls) < GATHERED_CALLS and not self._queue.empty():
                calls.append(self._queue.get_nowait())
            with self.step("recording"):
                await self._record(calls)
            for call in calls:
                self._waiting -= call.size
                self._settled += 1

    async def _record(self, calls: Sequence[PassedCall]) -> None:
        """Read calls, and write the traces of those that are recorded together. A call that fails is counted, and the
        others go on."""
        traces = list[tuple[PassedCall, CallTrace]]()
        for call in calls:
            await asyncio.sleep(0)  # an app's calls come first
            with self.step("reading"):
                if (trace := await self._read(call)) is not None:
                    traces.append((call, trace))
        writes = (
            self._store.write(add_thread_calls, ThreadCall(trace, self.run, call.thread)) for call, trace in traces
        )
        written = await asyncio.gather(*writes, return_exceptions=True)
        for (call, _), result in zip(traces, written, strict=True):
            if isinstance(result, Exception):
                self._fail(call, result)
            else:
                self.counts.recorded += 1

    async def _read(self, call: PassedCall) -> CallTrace | None:
        """What is recorded of a call, None if nothing is. Counts what is paid for it."""
        try:
            answer = whole_answer(call.dialect, b"".join(call.answer or ()))
            body: Answer = orjson.loads(call.request) if call.request else {}
            used = self._used(answer)
        except Exception as error:  # noqa: BLE001  # an answer of any shape
            self.counts.uncounted += call.small is None
            return self._fail(call, error)
        model, cost = "unknown", None
        with self.step("price"):
            model, price = self._answering(call, body)
            if call.small is None:
                self.counts.uncounted += used is None
                cost = None if used is None else self.counts.spend(used, price)
        if call.trajectory_id is None:
            return None
        try:
            read = await read_call(call.dialect, body, call.path, answer, self._recorded)
            return _trace(call, model, self._masked(read), used, cost)
        except Exception as error:  # noqa: BLE001  # a call of any shape
            return self._fail(call, error)

    def _used(self, answer: Answer) -> UsedTokens | None:
        """The tokens of an answer; None if the provider does not say them, or says what cannot be."""
        try:
            return used_tokens(answer)
        except ValueError as error:
            self._warn("usage", f"the provider's numbers of tokens are not counted: {error}")
            return None

    def _answering(self, call: PassedCall, body: Answer) -> tuple[str, Price | None]:
        """The model that answered, and its price, None if it is unknown."""
        if call.small is not None:
            return call.small, None
        asked = body.get("model") or call.path.get("named")
        provider = self.upstream.text.partition("/")[0]
        return f"{provider}/{asked}", self.upstream.price if asked == self.upstream.name else None

    def _masked(self, read: ReadCall) -> ReadCall:
        masking = Masking(redact if self.options.keep_personal else lambda text: mask_personal(redact(text)))
        answers = tuple((masking.message(message), status, reason) for message, status, reason in read.answers)
        tools = Masking(None).tools(read.tools)
        return ReadCall(tuple(map(masking.message, read.messages)), tools, read.sampling, answers)

    def _fail(self, call: PassedCall, error: Exception) -> None:
        """Count why a call is not recorded, if it was to be; log each reason once, without the call's text."""
        if call.trajectory_id is None:
            return
        reason = str(getattr(error, "code", None) or type(error).__name__)
        self.counts.skip(reason)
        self._warn(f"call {reason}", f"call {call.id} was answered, and is not recorded: {shown(error)}")

    async def _save(self) -> None:
        await self._store.write(save_notes, (self._key, self.counts.model_dump_json()))

    async def _save_all(self) -> None:
        saved = ""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            with self.step("saving"):
                if (text := self.counts.model_dump_json()) != saved:
                    await self._save()
                    saved = text

    async def retain(self) -> int:
        """Delete the threads that are too old or beyond the size; returns their number. Raises StoreError."""
        since = clock.now() - self.options.record_days * 86_400
        return await self._store.write(apply_retention, Retention(self.run, since, self.options.record_mb * 1e6))

    async def _retain(self) -> None:
        while True:
            with self.step("deleting old threads"):
                await self.retain()
            await asyncio.sleep(RETENTION_SECONDS)


_SPACES = re.compile(r"\s+")


def _trace(call: PassedCall, model: str, read: ReadCall, used: UsedTokens | None, cost: float | None) -> CallTrace:
    """The record of a call. Tokens are the provider's numbers, and belong to the first choice."""
    tokens = used or UsedTokens(0, 0)
    outputs = tuple(
        OutputTrace(
            index=index,
            message=message,
            finish_reason=reason,
            status=status,
            tokens=tokens.completion if index == 0 else 0,
            logprob_mean=None,
            logprob_min=None,
        )
        for index, (message, status, reason) in enumerate(read.answers)
    )
    return CallTrace(
        id=call.id,
        trajectory_id=call.trajectory_id or "",
        model=_SPACES.sub("-", model)[:200],
        step=0,
        status=outputs[0].status if outputs else CallStatus.FAILED,
        sampling=read.sampling,
        messages=read.messages,
        tools=read.tools,
        started_at=call.started_at,
        ended_at=call.ended_at,
        first_token_at=call.first_at if call.streamed else None,
        prompt_tokens=tokens.prompt,
        outputs=outputs,
        cost=cost,
    )
