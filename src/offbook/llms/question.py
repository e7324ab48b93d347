"""One question to an LLM: requests with retries, within the endpoint's concurrency, the deadline and the budget."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from offbook.base.backoff import backoff_seconds
from offbook.base.errors import LlmError
from offbook.base.redaction import redact

from .answer import Answer, ChatAnswer, Tokens
from .json_answers import response_format, with_fault, with_schema
from .ledger import SpendingTotals, spending
from .options import LlmOptions
from .outcome import Outcome, of_response
from .prices import estimate, price_of
from .provider import ResponseReader, complete, load


class EndpointSlots:
    """The requests in flight to one endpoint in one event loop. Callers may have different limits."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._waiting: list[asyncio.Event] = []

    @asynccontextmanager
    async def slot(self, limit: int) -> AsyncGenerator[None]:
        """Wait until fewer than `limit` requests are in flight, and count one inside the block."""
        while self._in_flight >= limit:
            turn = asyncio.Event()
            self._waiting.append(turn)
            await turn.wait()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            waiting, self._waiting = self._waiting, []
            for turn in waiting:  # limits differ, so all of them check again
                turn.set()


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, EndpointSlots]] = WeakKeyDictionary()


def slots_of(endpoint: str) -> EndpointSlots:
    """The slots of an endpoint in the running event loop."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault(endpoint, EndpointSlots())


Value = TypeVar("Value")
Result = TypeVar("Result")
Messages = Sequence[Mapping[str, Any]]
Reader = Callable[[str], tuple[Value, int]]
"""Text -> the value, and the number of repairs. Raises ValueError that says what is wrong."""

logger = logging.getLogger("offbook")

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds: upper bound of the first random wait, which doubles with every retry, and its maximum."""

_without_schema: set[tuple[str, str]] = set()
"""(endpoint, model) pairs that rejected a schema. With `structured="auto"` the schema is then written into the prompt."""


@dataclass
class Taken:
    """Tokens and cost (USD) of all requests of a question so far; None if unknown for one of them."""

    tokens: Tokens | None = field(default_factory=lambda: Tokens(0, 0))
    cost: float | None = 0.0

    def add(self, outcome: Outcome) -> None:
        """Add one answered request."""
        if self.tokens is None or outcome.tokens is None:
            self.tokens = None
        else:
            (prompt, completion), more = self.tokens, outcome.tokens
            self.tokens = Tokens(prompt + more.prompt, completion + more.completion)
        self.cost = None if self.cost is None or outcome.cost is None else self.cost + outcome.cost


class Question:
    """One question; use an object once.

    The retry loop is hand-written: a library such as tenacity does not cover Retry-After against a deadline, nor slots and
    budgets held per request.
    """

    def __init__(self, options: LlmOptions, purpose: str, read: ResponseReader = of_response) -> None:
        self._options = options
        self._purpose = purpose
        self._read = read
        self._taken = Taken()
        self._deadline = asyncio.timeout(None)

    async def answer(self, messages: Messages, reader: Reader[Value], schema: type[BaseModel] | None) -> Answer[Value]:
        """Ask until the reader accepts the answer, and record it. Raises LlmError, BudgetExceeded, ConfigError.

        The LlmError has no cause: the provider's exception and its frames contain keys.
        """
        answer = await self._in_time(self._twice(messages, reader, schema))
        spending().record(self._purpose, SpendingTotals(questions=1, repairs=answer.repairs))
        return answer

    async def chat(self, messages: Messages) -> ChatAnswer:
        """Request a completion, with retries after failures. Raises as `answer`."""

        await asyncio.to_thread(load)  # importing litellm takes seconds, which must not count as the model's time

        async def completed() -> ChatAnswer:
            outcome = await self._request(messages, None)
            if outcome.kind != "ok":
                raise LlmError(self._named(outcome.message), kind=outcome.kind)
            return ChatAnswer(
                outcome.choices, self._taken.tokens, self._taken.cost, outcome.seconds, outcome.served_model
            )

        answer = await self._in_time(completed())
        spending().record(self._purpose, SpendingTotals(questions=1))
        return answer

    async def _in_time(self, work: Awaitable[Result]) -> Result:
        """Await the work within the deadline. A failure is recorded, and raised without its cause."""
        try:
            async with self._deadline:
                return await work
        except TimeoutError:
            if not self._deadline.expired():
                raise
            late = LlmError(self._named(f"no answer within deadline={self._options.deadline:g} s"), kind="timeout")
        except LlmError as error:
            late = error
        spending().record(self._purpose, SpendingTotals(questions=1, failed=1))
        raise late

    async def _twice(self, messages: Messages, reader: Reader[Value], schema: type[BaseModel] | None) -> Answer[Value]:
        """Ask, and ask once more, with the reason, if the answer is empty or invalid."""
        conversation, fault = messages, ""
        for repairs in (0, 1):
            outcome = await self._asked(conversation, schema)
            if outcome.kind == "empty" and not repairs:
                continue
            if outcome.kind != "ok":
                raise LlmError(self._named(outcome.message), kind=outcome.kind)
            try:
                value, text_repairs = reader(outcome.text)
            except ValueError as error:
                fault = str(error)
            else:
                took = self._taken
                return Answer(
                    value, outcome.text, took.tokens, took.cost, False, repairs + text_repairs, outcome.served_model
                )
            if schema is not None:
                conversation = with_fault(messages, outcome.text, fault, schema)
        raise LlmError(self._named(f"the answer does not fit, also when asked again: {fault}"), kind="invalid")

    async def _asked(self, messages: Messages, schema: type[BaseModel] | None) -> Outcome:
        """Send the messages with the schema in the form that the provider accepts."""
        if schema is None:
            return await self._request(messages, None)
        options, place = self._options, (self._options.endpoint, self._options.model)
        if options.structured == "prompt" or (options.structured == "auto" and place in _without_schema):
            return await self._request(with_schema(messages, schema), None)
        outcome = await self._request(messages, response_format(schema))
        if not outcome.rejects_schema:
            return outcome
        if options.structured == "schema":
            hint = 'structured="schema" was asked for; "auto" and "prompt" write the schema into the messages'
            return replace(outcome, message=f"{outcome.message}. {hint}")
        if place not in _without_schema:
            logger.info("%s takes no JSON schema: it is written into the messages (%s)", options.model, outcome.message)
        _without_schema.add(place)
        return await self._request(with_schema(messages, schema), None)

    async def _request(self, messages: Messages, format: Mapping[str, Any] | None) -> Outcome:
        """Send a request, with retries after a transient failure: 408, 429, 5xx, a broken connection."""
        options = self._options
        for attempt in count(1):
            outcome = await self._once(messages, format)
            if not outcome.passing:
                return outcome
            if attempt > options.retries:
                return replace(outcome, message=f"{outcome.message} (after {attempt} attempts)")
            seconds = wait_before(attempt, outcome.retry_after)
            now, end = asyncio.get_running_loop().time(), self._deadline.when()
            if end is not None and now + seconds > end:
                told = f"; the next attempt would be in {seconds:.0f} s, past deadline={options.deadline:g} s"
                return replace(outcome, message=outcome.message + told)
            logger.info("%s is asked again in %.1f s: %s", options.model, seconds, outcome.message)
            await asyncio.sleep(seconds)
        raise AssertionError("unreachable")

    async def _once(self, messages: Messages, format: Mapping[str, Any] | None) -> Outcome:
        options, ledger = self._options, spending()
        expected = await self._estimate(messages) if ledger.limited else 0.0
        async with slots_of(options.endpoint).slot(options.concurrency), ledger.reserved(expected) as reservation:
            if self._deadline.when() is None:
                self._deadline.reschedule(asyncio.get_running_loop().time() + options.deadline)
            began = time.monotonic()
            outcome = await complete(options, messages, format, self._read)
            outcome = replace(outcome, seconds=time.monotonic() - began)
            reservation.charge(outcome.cost)
        if outcome.answered:
            self._taken.add(outcome)
        tokens = outcome.tokens or Tokens(0, 0)
        ledger.record(
            self._purpose,
            SpendingTotals(
                requests=1,
                prompt_tokens=tokens.prompt,
                completion_tokens=tokens.completion,
                uncounted=int(outcome.answered and outcome.tokens is None),
                cost=outcome.cost or 0.0,
                unpriced=int(outcome.cost is None),
            ),
        )
        return outcome

    async def _estimate(self, messages: Messages) -> float:
        litellm = await asyncio.to_thread(load)
        size = len(json.dumps([dict(message) for message in messages], ensure_ascii=False).encode("utf-8", "replace"))
        return estimate(self._options, size, price_of(self._options, litellm.model_cost))

    def _named(self, message: str) -> str:
        return redact(f"{self._options.model}: {message}")


def wait_before(attempt: int, retry_after: float | None) -> float:
    """Seconds to wait after this attempt (the first is 1).

    With `retry_after`, that time plus a small random part. Otherwise random up to a bound that doubles ("full jitter").
    """
    if retry_after is not None:
        return retry_after + random.uniform(0, FIRST_WAIT / 4)
    return random.uniform(0, backoff_seconds(attempt, FIRST_WAIT, LONGEST_WAIT))
