"""`Llm`: a client of one other LLM. A `Question` is one of its requests until the answer can be used."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel

from offbook.base.clock import backoff_seconds
from offbook.base.errors import ConfigError, LlmError
from offbook.base.redaction import is_secret_name, protect, protect_environment, redact

from .cache import AnswerCache, StoredAnswer, answer_cache, question_key
from .json_answers import read, response_format, with_fault, with_schema
from .ledger import SpendingTotals, spending
from .options import LlmOptions
from .prices import estimate, price_of
from .provider import (
    Answer,
    ChatAnswer,
    Outcome,
    ResponseReader,
    Tokens,
    complete,
    load,
    of_chat_response,
    of_response,
)

if TYPE_CHECKING:
    from offbook.base.types import Json, Message

logger = logging.getLogger("offbook")

Value = TypeVar("Value")
Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")
Messages = Sequence[Mapping[str, Any]]
Reader = Callable[[str], tuple[Value, int]]
"""Text -> the value, and the number of repairs. Raises ValueError that says what is wrong."""

FIRST_WAIT, MAX_WAIT = 1.0, 60.0
"""Seconds: upper bound of the first random wait, which doubles with every retry, and its maximum."""

_without_schema: set[tuple[str, str]] = set()
"""(endpoint, model) pairs that rejected a schema. The schema is then written into the prompt."""
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()
"""Event loop -> (endpoint, limit) -> the requests in flight."""
KEY_VERSION = 1
"""Part of every cache key; increased when the same question is sent differently."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


CHAT_FIELDS = frozenset(
    [
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
        "stop",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
    ]
)
"""Fields of OpenAI's chat completions that are passed on. Streaming is not."""

_fixed_temperature: set[tuple[str, str]] = set()
"""(endpoint, model) pairs that rejected a temperature; later requests leave it out."""


class Llm:
    """A client of another LLM: `Llm("openai/o3")`, `Llm("hosted_vllm/name", api_base="http://gpu-box:8000/v1")`.

    Options are those of `LlmOptions`. Any other option is a parameter of litellm, such as temperature. Raises ConfigError.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.options = LlmOptions.of(model, options)

    def __repr__(self) -> str:
        return f"Llm({self.options.model!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Llm) and other.options == self.options

    def __hash__(self) -> int:
        return hash(self.options)

    async def ask(
        self,
        messages: Messages,
        schema: type[Model],
        purpose: str = "judge",
        check: Callable[[Model], None] | None = None,
        sample: int = 0,
    ) -> Answer[Model]:
        """Ask for an answer that matches `schema`.

        `check` raises ValueError for an unacceptable value. An invalid answer is requested once more, with the reason.
        `sample` distinguishes equal questions: every number has its own cached answer. Raises LlmError, BudgetExceeded,
        ConfigError for wrong settings, MissingExtraError without litellm.
        """

        def reader(text: str) -> tuple[Model, int]:
            value, repairs = read(text, schema)
            if check is not None:
                check(value)
            return value, repairs

        return await self._answer(messages, reader, schema, purpose, sample)

    async def ask_text(self, messages: Messages, purpose: str = "judge", sample: int = 0) -> Answer[str]:
        """Ask for an answer as text. Raises as `ask`."""
        return await self._answer(messages, lambda text: (text, 0), None, purpose, sample)

    async def chat(
        self, messages: Messages, fields: Mapping[str, Any] | None = None, purpose: str = "chat"
    ) -> ChatAnswer:
        """Request a chat completion. `fields` are those of OpenAI's API, such as tools. The answer is not cached or checked.

        Raises LlmError, BudgetExceeded, ConfigError, MissingExtraError.
        """
        self._protect_keys()
        return await ask_chat(self.options, _plain(messages), fields or {}, purpose)

    async def _answer(
        self, messages: Messages, reader: Reader[Value], schema: type[BaseModel] | None, purpose: str, sample: int
    ) -> Answer[Value]:
        """Answer from the cache, else ask. Of concurrent equal questions only one is sent."""
        options, plain = self.options, _plain(messages)
        self._protect_keys()
        if options.cache is None:
            return await Question(options, purpose).answer(plain, reader, schema)
        cache = answer_cache(options.cache)
        key = question_key(
            {
                "version": KEY_VERSION,
                "endpoint": options.endpoint,
                "model": options.model,
                "messages": plain,
                "parameters": options.litellm_parameters,
                "schema": schema.model_json_schema() if schema is not None else None,
                "sample": sample,
            }
        )
        kept = await _kept(cache, key, reader, purpose)
        if kept is not None:
            return kept
        async with cache.asking(key):
            kept = await _kept(cache, key, reader, purpose)
            if kept is not None:
                return kept
            answer = await Question(options, purpose).answer(plain, reader, schema)
            await cache.put(key, StoredAnswer(answer.text, answer.tokens, answer.repairs, answer.served_model))
            return answer

    def _protect_keys(self) -> None:
        protect_environment()
        if self.options.api_key is not None:
            protect([self.options.api_key.get_secret_value()])
        parameters = self.options.litellm_parameters
        headers: dict[str, Any] = parameters.get("extra_headers") or {}
        for name, value in [*parameters.items(), *headers.items()]:
            if isinstance(value, str) and is_secret_name(name):
                protect([value, value.removeprefix("Bearer ")])


async def _kept(cache: AnswerCache, key: str, reader: Reader[Value], purpose: str) -> Answer[Value] | None:
    """The cached answer, if it is still valid: the caller's `check` may have changed."""
    stored = await cache.get(key)
    if stored is None:
        return None
    try:
        value, _ = reader(stored.text)
    except ValueError:
        return None
    spending().record(purpose, SpendingTotals(questions=1, cached=1))
    return Answer(value, stored.text, stored.tokens, 0.0, True, stored.repairs, stored.served_model)


def _plain(messages: Messages) -> list[dict[str, Any]]:
    """The messages as plain JSON values. Lone surrogates, which UTF-8 cannot encode, become U+FFFD. Raises ConfigError."""
    try:
        text = json.dumps([dict(message) for message in messages], ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"messages: a list of dicts of JSON values is needed: {error}") from error
    if not messages:
        raise ConfigError("messages: at least one is needed")
    return json.loads(_LONE_SURROGATE.sub("\ufffd", text))


async def ask_chat(
    options: LlmOptions, messages: Sequence[Message], fields: Mapping[str, Json], purpose: str
) -> ChatAnswer:
    """Request one completion. Parameters of `options` override `fields`.

    If the model rejects the temperature, the request is repeated without it, which is logged once. Raises LlmError,
    BudgetExceeded, ConfigError.
    """
    endpoint_model = (options.endpoint, options.model)
    sent = {name: value for name, value in fields.items() if name in CHAT_FIELDS and value is not None}
    sent |= options.litellm_parameters
    if endpoint_model in _fixed_temperature:
        sent.pop("temperature", None)
    try:
        return await Question(_with(options, sent), purpose, of_chat_response).chat(messages)
    except LlmError as error:
        if "temperature" not in sent or not _rejects_temperature(str(error)):
            raise
        reason = str(error)
    if endpoint_model not in _fixed_temperature:
        logger.warning(
            "%s does not accept temperature=%s: its own default is used (%s)",
            options.model,
            sent["temperature"],
            reason,
        )
    _fixed_temperature.add(endpoint_model)
    del sent["temperature"]
    return await Question(_with(options, sent), purpose, of_chat_response).chat(messages)


def _with(options: LlmOptions, parameters: Mapping[str, Any]) -> LlmOptions:
    try:
        text = json.dumps(parameters, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"chat: the fields of a request must be JSON values: {error}") from error
    return options.model_copy(update={"parameters": text})


def _rejects_temperature(reason: str) -> bool:
    low = reason.lower()
    return "temperature" in low and any(word in low for word in ("support", "only the default", "deprecated"))


def slots_of(endpoint: str, limit: int) -> asyncio.Semaphore:
    """The slots of an endpoint in the running event loop."""
    return _slots.setdefault(asyncio.get_running_loop(), {}).setdefault((endpoint, limit), asyncio.Semaphore(limit))


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
            outcome = await self._request_schema(conversation, schema)
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

    async def _request_schema(self, messages: Messages, schema: type[BaseModel] | None) -> Outcome:
        """Send the messages with the schema in the form that the provider accepts."""
        if schema is None:
            return await self._request(messages, None)
        options, place = self._options, (self._options.endpoint, self._options.model)
        if place in _without_schema:
            return await self._request(with_schema(messages, schema), None)
        outcome = await self._request(messages, response_format(schema))
        if not outcome.rejects_schema:
            return outcome
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
                late = f"; the next attempt would be in {seconds:.0f} s, past deadline={options.deadline:g} s"
                return replace(outcome, message=outcome.message + late)
            logger.info("%s is asked again in %.1f s: %s", options.model, seconds, outcome.message)
            await asyncio.sleep(seconds)
        raise AssertionError("unreachable")

    async def _once(self, messages: Messages, format: Mapping[str, Any] | None) -> Outcome:
        options, ledger = self._options, spending()
        expected = await self._estimate(messages) if ledger.limited else 0.0
        async with slots_of(options.endpoint, options.concurrency), ledger.reserved(expected) as reservation:
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
    return random.uniform(0, backoff_seconds(attempt, FIRST_WAIT, MAX_WAIT))
