"""Requests to providers and their answers. The only module that imports litellm.

litellm translates requests for providers, authenticates and counts tokens. Its retries, caching and schema handling are not
used. It raises no exception for empty, refused, filtered and truncated answers, and has one class for a rate limit and an
exhausted account, so `Outcome` classifies them here.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from offbook.base.errors import ConfigError, LlmErrorKind, MissingExtraError
from offbook.base.numbers import usd
from offbook.base.redaction import guard_logs, redact

from .options import LlmOptions
from .prices import Table, cost_of, price_of, table_name, used_tokens

if TYPE_CHECKING:
    from offbook.base.types import Json

logger = logging.getLogger("offbook")

QUIET = {
    "LITELLM_MODE": "PRODUCTION",  # else it loads the nearest .env into the environment
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a price table on import
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",  # else it fetches a file with the first call
}
LOGGERS = ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy")
NO_KEY_NEEDED = "none"
KEY_OF = {"openai": "OPENAI_API_KEY", "hosted_vllm": "HOSTED_VLLM_API_KEY"}
"""Providers whose servers may need no key. litellm reports a missing key as a failure of the server."""

EMPTY_ACCOUNT = ("insufficient_quota", "credit balance", "payment required")
PERHAPS_EMPTY = ("exceeded your current quota", "billing")
"""Some providers also use these words for a limit per minute, and then say when to retry."""
NO_KEY = re.compile(r"missing credentials|missing [\w ]*api[ _]key|api_key client option must be set")
"""litellm's messages for a missing key, mostly with status 500."""
SCHEMA_WORDS = ("response_format", "json_schema", "response_schema", "structured output", "grammar", "guided")
PASSING_STATUS = (408, 409, 425, 429)
NATIVE_FILTERS = ("safety", "content_filter", "recitation", "blocklist", "prohibited", "spii", "refusal")
"""Providers' finish reasons that litellm maps to `stop`."""
MAX_MESSAGE = 600

Value = TypeVar("Value")


class Tokens(NamedTuple):
    """Prompt and completion tokens, summed over an answer's requests."""

    prompt: int
    completion: int


@dataclass(frozen=True)
class Answer(Generic[Value]):
    """A validated answer; `text` is what the model wrote.

    `tokens` and `cost` (USD) are sums over all requests of the question; None if the provider did not report them, or the
    price is unknown. A cached answer costs 0 and has its original tokens. `repairs` counts repaired JSON and repeated
    questions.
    """

    value: Value
    text: str
    tokens: Tokens | None
    cost: float | None
    cached: bool = False
    repairs: int = 0
    served_model: str | None = None


@dataclass(frozen=True)
class ChatAnswer:
    """A chat completion. `choices` are in OpenAI's format.

    `tokens` and `cost` (USD) are None if the provider did not report them, or the price is unknown. `seconds` is the time of
    the successful request, without waiting and retries.
    """

    choices: tuple[Json, ...]
    tokens: Tokens | None
    cost: float | None
    seconds: float
    served_model: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of one request: `ok` with the text, or the kind of failure.

    `answered` means that the provider answered, which may cost. `passing` means that a retry may succeed, after
    `retry_after` seconds if the provider said so.
    """

    kind: Literal["ok"] | LlmErrorKind
    text: str = ""
    message: str = ""
    tokens: Tokens | None = None
    cost: float | None = 0.0
    served_model: str | None = None
    answered: bool = False
    passing: bool = False
    retry_after: float | None = None
    rejects_schema: bool = False
    choices: tuple[Json, ...] = ()  # of a chat completion, as OpenAI's API has them
    seconds: float = 0.0  # from the request to its end


ResponseReader = Callable[[Any, Tokens | None, float | None], Outcome]
"""(litellm's response, tokens, cost in USD) -> the outcome of the request."""


def of_response(response: Any, tokens: Tokens | None, cost: float | None) -> Outcome:
    """Classify a response that litellm accepted."""
    served = str(response.model) if response.model else None

    def ended(kind: Literal["ok"] | LlmErrorKind, message: str = "", text: str = "") -> Outcome:
        return Outcome(kind, text, message, tokens, cost, served, answered=True)

    if not response.choices:
        return ended("empty", "the answer has no choices")
    choice = response.choices[0]
    extra: Mapping[str, Any] = getattr(choice.message, "provider_specific_fields", None) or {}
    refusal = getattr(choice.message, "refusal", None) or extra.get("refusal")
    of_choice: Mapping[str, Any] = getattr(choice, "provider_specific_fields", None) or {}
    native = str(of_choice.get("native_finish_reason") or "").lower()
    text = choice.message.content
    if refusal:
        return ended("refused", f"the model refused: {_shown(refusal)}")
    if choice.finish_reason == "content_filter" or any(word in native for word in NATIVE_FILTERS):
        return ended("filtered", f"the provider's content filter withheld the answer ({native or 'content_filter'})")
    if choice.finish_reason == "length":
        limit = "raise max_tokens= of the Llm" if text else "reasoning may have taken all tokens: raise max_tokens="
        return ended("cut", f"the answer reached its token limit; {limit}")
    if not isinstance(text, str) or not text.strip():
        return ended("empty", f"the answer has no text (finish_reason {choice.finish_reason!r})")
    return ended("ok", text=text)


def of_chat_response(response: Any, tokens: Tokens | None, cost: float | None) -> Outcome:
    """Classify a response for an app. Truncated answers, refusals and tool calls without text are `ok` too."""
    served = str(response.model) if response.model else None
    if not response.choices:
        return Outcome("empty", message="the answer has no choices", tokens=tokens, cost=cost, answered=True)
    choices = tuple(_chat_choice(index, choice) for index, choice in enumerate(response.choices))
    return Outcome("ok", tokens=tokens, cost=cost, served_model=served, answered=True, choices=choices)


def _chat_choice(index: int, choice: Any) -> Json:
    """A choice in OpenAI's format, without litellm's own fields."""
    message: dict[str, Any] = choice.message.model_dump(exclude_none=True)
    extra: Mapping[str, Any] = message.pop("provider_specific_fields", None) or {}
    if extra.get("refusal"):
        message.setdefault("refusal", extra["refusal"])
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    for call in calls:
        call.pop("index", None)
    kept = {name: message[name] for name in ("reasoning_content", "refusal") if message.get(name)}
    named = {"role": "assistant", "content": message.get("content"), **kept}
    if calls:
        named["tool_calls"] = calls
    return {"index": index, "finish_reason": choice.finish_reason or "stop", "message": named}


def of_exception(error: Exception) -> Outcome:
    """Classify an exception that litellm raised. The message is redacted, since providers echo keys."""
    status, text = getattr(error, "status_code", None), str(error)
    status = status if isinstance(status, int) else None
    low, name = f"{text} {getattr(error, 'body', None)}".lower(), type(error).__name__
    shown = f"{name}: {_shown(text.removeprefix(f'litellm.{name}: ').removeprefix(f'{name}: '))}"
    if status in (401, 403) or NO_KEY.search(low):
        return Outcome("authentication", message=f"{shown}. Set api_key=, or the provider's environment variable")
    wait = retry_after(getattr(error, "litellm_response_headers", None))
    if status == 402 or (status == 429 and _is_empty(low, wait)):
        return Outcome("quota", message=shown)
    if name == "ContentPolicyViolationError" or (status == 400 and "content_filter" in low):
        return Outcome("filtered", message=shown)
    if name == "UnsupportedParamsError" or status in (400, 422):
        return Outcome("failed", message=shown, rejects_schema=any(words in low for words in SCHEMA_WORDS))
    if name == "Timeout":
        return Outcome("timeout", message=shown, passing=True, retry_after=wait)
    garbled = name == "APIError" and status == 200  # a body that is not JSON; some providers give a 500 instead
    if status in PASSING_STATUS or (status is not None and status >= 500) or garbled:
        return Outcome("failed", message=shown, passing=True, retry_after=wait)
    return Outcome("failed", message=shown)


def _is_empty(text: str, wait: float | None) -> bool:
    """Whether a 429 means an exhausted account instead of too many requests."""
    if any(words in text for words in EMPTY_ACCOUNT):
        return True
    return wait is None and "retrydelay" not in text and any(words in text for words in PERHAPS_EMPTY)


def retry_after(headers: Any) -> float | None:
    """Seconds to wait, from `Retry-After` (seconds or an HTTP date); None without a valid header."""
    fields = {str(name).lower(): str(value) for name, value in headers.items()} if hasattr(headers, "items") else {}
    value = fields.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
            seconds = ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
        except (ValueError, OverflowError):  # a zone that no date can have
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _shown(text: object) -> str:
    clean = redact(" ".join(str(text).split()))
    return clean if len(clean) <= MAX_MESSAGE else f"{clean[:MAX_MESSAGE]}..."


@cache
def installed_prices() -> Table:
    """litellm's price table, read from its file without importing it; empty where it is not installed."""
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).parent / "model_prices_and_context_window_backup.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


@cache
def load() -> Any:
    """Import and configure litellm, once; takes about 2 s. Raises MissingExtraError."""
    if "litellm" not in sys.modules:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
    try:
        litellm: Any = importlib.import_module("litellm")
    except ModuleNotFoundError as error:
        if error.name != "litellm":
            raise
        raise MissingExtraError("litellm", "judge") from None
    litellm.suppress_debug_info = True  # it prints to stdout, which may carry a protocol
    for name in LOGGERS:
        library_logger = logging.getLogger(name)
        if library_logger.level == logging.NOTSET:
            library_logger.setLevel(logging.ERROR)  # with a root logger at DEBUG it would log all prompts
    guard_logs()
    return litellm


async def complete(
    options: LlmOptions,
    messages: Sequence[Mapping[str, Any]],
    response_format: Mapping[str, Any] | None,
    read: ResponseReader = of_response,
) -> Outcome:
    """Send exactly one request. `read` classifies a response that litellm accepted.

    Raises ConfigError for a model whose provider litellm does not know.
    """
    litellm = await asyncio.to_thread(load)
    try:
        async with asyncio.timeout(options.timeout):
            response = await litellm.acompletion(**_request(options, messages, response_format))
    except TimeoutError:
        return Outcome("timeout", message=f"no answer within timeout={options.timeout:g} s", passing=True)
    except Exception as error:  # noqa: BLE001  # litellm's own classes, and any error in its translation
        if "LLM Provider NOT provided" in str(error):
            unknown = ConfigError(
                f"model: litellm knows no provider of {options.model!r}: name it as in openai/o3, anthropic/claude-sonnet-4-5 or "
                "hosted_vllm/name"
            )
        else:
            return of_exception(error)
    else:
        return read(response, *_usage(litellm, response, options))
    raise unknown


def _request(
    options: LlmOptions, messages: Sequence[Mapping[str, Any]], response_format: Mapping[str, Any] | None
) -> dict[str, Any]:
    """litellm's arguments. `max_retries=0` sends one request. litellm creates a client per `timeout`, so it stays constant."""
    key = options.api_key.get_secret_value() if options.api_key is not None else None
    provider = options.model.partition("/")[0]
    if key is None and options.api_base is not None and provider in KEY_OF:
        key = os.environ.get(KEY_OF[provider]) or NO_KEY_NEEDED
    request: dict[str, Any] = {
        **options.litellm_parameters,
        "model": options.model,
        "messages": [dict(message) for message in messages],
        "api_base": options.api_base,
        "api_key": key,
        "timeout": options.timeout,
        "max_retries": 0,
    }
    if response_format is not None:
        request["response_format"] = dict(response_format)
    return request


def _usage(litellm: Any, response: Any, options: LlmOptions) -> tuple[Tokens | None, float | None]:
    """Tokens and cost in USD; None if unknown. Without usage litellm reports 0 tokens, which would look free."""
    usage = getattr(response, "usage", None)
    try:
        used = None if usage is None else used_tokens({"usage": usage.model_dump()})
    except ValueError as error:
        logger.warning("the tokens of an answer of %s are unknown: %s", options.model, error)
        used = None
    if used is None:
        return None, None
    tokens = Tokens(used.prompt, used.completion)
    name = table_name(options.model, litellm.model_cost)
    if options.prices is None and name is not None:  # the table also has service tiers and audio
        provider = litellm.model_cost[name].get("litellm_provider")
        try:
            return tokens, usd(sum(litellm.cost_per_token(name, custom_llm_provider=provider, usage_object=usage)))
        except Exception as error:  # noqa: BLE001  # litellm's own errors and malformed table entries
            logger.warning("litellm cannot price an answer of %s: %s", options.model, type(error).__name__)
    price = price_of(options, litellm.model_cost)
    return tokens, None if price is None else cost_of(used, price)
