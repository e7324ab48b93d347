"""Classifies the result of one request.

litellm raises no exception for empty, refused, filtered and truncated answers, and has one class for a rate limit and an
exhausted account.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

from offbook.base.errors import LlmErrorKind
from offbook.base.redaction import redact

from .answer import Tokens

if TYPE_CHECKING:
    from offbook.base.types import Json

EMPTY_ACCOUNT = ("insufficient_quota", "credit balance", "payment required")
PERHAPS_EMPTY = ("exceeded your current quota", "billing")
"""Some providers also use these words for a limit per minute, and then say when to retry."""
NO_KEY = re.compile(r"missing credentials|missing [\w ]*api[ _]key|api_key client option must be set")
"""litellm's messages for a missing key, mostly with status 500."""
SCHEMA_WORDS = ("response_format", "json_schema", "response_schema", "structured output", "grammar", "guided")
PASSING_STATUS = (408, 409, 425, 429)
NATIVE_FILTERS = ("safety", "content_filter", "recitation", "blocklist", "prohibited", "spii", "refusal")
"""Providers' finish reasons that litellm maps to `stop`."""
LONGEST_MESSAGE = 600


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
    """Seconds to wait, from `retry-after-ms` or `Retry-After` (seconds or an HTTP date); None without a valid header."""
    fields = {str(name).lower(): str(value) for name, value in headers.items()} if hasattr(headers, "items") else {}
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = fields.get(name)
        if value is None:
            continue
        seconds = _seconds(value, unit)
        if seconds is not None:
            return max(0.0, seconds)
    return None


def _seconds(value: str, unit: float) -> float | None:
    try:
        number = float(value) / unit
        return number if math.isfinite(number) else None
    except ValueError:
        return _until(value)


def _until(date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
        return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
    except (ValueError, OverflowError):  # a zone that no date can have
        return None


def _shown(text: object) -> str:
    clean = redact(" ".join(str(text).split()))
    return clean if len(clean) <= LONGEST_MESSAGE else f"{clean[:LONGEST_MESSAGE]}..."
