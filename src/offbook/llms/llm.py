"""`Llm`: a client of one other LLM."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from offbook.base.errors import ConfigError, LlmError
from offbook.base.redaction import is_secret_name, protect, protect_environment

from .answer import Answer, ChatAnswer
from .cache import AnswerCache, StoredAnswer, answer_cache, question_key
from .json_answers import read
from .ledger import SpendingTotals, spending
from .options import LlmOptions
from .outcome import of_chat_response
from .question import Question, Reader

if TYPE_CHECKING:
    from offbook.base.types import Json, Message

logger = logging.getLogger("offbook")

Value = TypeVar("Value")
Model = TypeVar("Model", bound=BaseModel)
Messages = Sequence[Mapping[str, Any]]

KEY_VERSION = 1
"""Part of every cache key; increased when the same question is sent differently."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


CHAT_FIELDS = frozenset(
    {
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
    }
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
                "structured": options.structured if schema is not None else None,
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
