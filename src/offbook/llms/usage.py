"""The tokens of an answer, as the `usage` of any API says them. A provider's numbers are checked here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from offbook.base.numbers import token_count

Fields = Mapping[str, Any]


class UsedTokens(NamedTuple):
    """Tokens of a call as its provider counted them. `cached` of the prompt were read from the provider's cache, `written` of
    it were written there, `written_1h` of these for an hour."""

    prompt: int
    completion: int
    cached: int = 0
    written: int = 0
    written_1h: int = 0


def used_tokens(answer: Fields) -> UsedTokens | None:
    """The tokens of a whole answer of chat completions, Responses, Messages or Gemini, or of one of litellm's.

    None if it does not say them, as streams of chat completions without `stream_options.include_usage`: some servers say 0
    then. Raises ValueError, with the field, if it says what cannot be: a count that is negative or not whole, more cached
    tokens than the prompt has.
    """
    if usage := _fields(answer, "usageMetadata"):
        used = _of_gemini(usage)
    elif usage := _fields(answer, "usage"):
        used = _of_chat(usage) if "prompt_tokens" in usage else _of_messages(usage)
    else:
        return None
    if used.cached + used.written > used.prompt or used.written_1h > used.written:
        raise ValueError(f"usage says {used.cached} cached and {used.written} written tokens of {used.prompt}")
    return used if used.prompt or used.completion else None


def _of_gemini(usage: Fields) -> UsedTokens:
    prompt = _count(usage, "promptTokenCount") + _count(usage, "toolUsePromptTokenCount")
    completion = _count(usage, "candidatesTokenCount") + _count(usage, "thoughtsTokenCount")
    return UsedTokens(prompt, completion, _count(usage, "cachedContentTokenCount"))


def _of_chat(usage: Fields) -> UsedTokens:
    details = _fields(usage, "prompt_tokens_details")
    return UsedTokens(
        _count(usage, "prompt_tokens"),
        max(
            _count(usage, "completion_tokens"), _count(_fields(usage, "completion_tokens_details"), "reasoning_tokens")
        ),
        _count(details, "cached_tokens"),
        max(
            _count(details, "cache_write_tokens"),  # OpenAI's and OpenRouter's
            _count(details, "cache_creation_tokens"),  # litellm's
            _count(usage, "cache_creation_input_tokens"),
        ),
        max(
            _count(_fields(details, "cache_creation_token_details"), _1H), _count(_fields(usage, "cache_creation"), _1H)
        ),
    )


def _of_messages(usage: Fields) -> UsedTokens:
    """Messages count cached tokens beside `input_tokens`, Responses within them."""
    details = _fields(usage, "input_tokens_details")
    read, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    return UsedTokens(
        _count(usage, "input_tokens") + read + written,
        max(_count(usage, "output_tokens"), _count(_fields(usage, "output_tokens_details"), "reasoning_tokens")),
        read or _count(details, "cached_tokens"),
        written or _count(details, "cache_write_tokens"),
        _count(_fields(usage, "cache_creation"), _1H),
    )


_1H = "ephemeral_1h_input_tokens"


def _fields(value: Fields, name: str) -> Fields:
    """The object in a field; empty if there is none. Raises ValueError for anything else."""
    field: object = value.get(name)
    if field is None:
        return {}
    if not isinstance(field, Mapping):
        raise ValueError(f"{name} is of type {type(field).__name__}, and no object")
    return cast(Fields, field)


def _count(usage: Fields, name: str) -> int:
    """The count in a field; 0 if there is none. Raises ValueError for what is no count."""
    value: object = usage.get(name)
    count = 0 if value is None else token_count(value)
    if count is None:
        shown = f"{value:g}" if isinstance(value, float) else type(value).__name__
        raise ValueError(f"usage.{name} is {shown}, and no number of tokens")
    return count
