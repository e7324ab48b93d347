"""What an answer used and costs: its tokens, as the `usage` of any API says them, and prices by the requested model name.

A provider's numbers are checked here, and nowhere else. The model name in its response may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from offbook.base.errors import ConfigError
from offbook.base.numbers import token_count

from .options import LlmOptions, Price

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


MILLION = 1_000_000
LIKELY_COMPLETION = 4096
"""Assumed limit of a completion, in tokens, if the request has none."""
LENGTHS = ("max_completion_tokens", "max_tokens")

Table = Mapping[str, Mapping[str, Any]]
"""litellm's `model_cost`."""


def table_name(model: str, table: Table) -> str | None:
    """The table's name for `provider/model`: the same, or `model` if it belongs to the same provider; None if unknown."""
    if model in table:
        return model
    provider, _, rest = model.partition("/")
    return rest if rest in table and table[rest].get("litellm_provider") == provider else None


_COSTS = {
    "prompt": "input_cost_per_token",
    "completion": "output_cost_per_token",
    "cached_prompt": "cache_read_input_token_cost",
    "cache_write": "cache_creation_input_token_cost",
    "cache_write_1h": "cache_creation_input_token_cost_above_1hr",
}


def price_of(options: LlmOptions, table: Table) -> Price | None:
    """The price from the options, else from the table, for prompts of ordinary length; None if unknown."""
    if options.prices is not None:
        return options.prices
    name = table_name(options.model, table)
    entry: Mapping[str, Any] = {} if name is None else table[name]
    costs: dict[str, float] = {
        field: entry[key] * MILLION for field, key in _COSTS.items() if entry.get(key) is not None
    }
    return Price(**costs) if "prompt" in costs and "completion" in costs else None


def cost_of(used: UsedTokens, price: Price) -> float:
    """The cost of one answer in USD."""
    cached = price.prompt if price.cached_prompt is None else price.cached_prompt
    written = price.prompt if price.cache_write is None else price.cache_write
    written_1h = written if price.cache_write_1h is None else price.cache_write_1h
    return (
        (used.prompt - used.cached - used.written) * price.prompt
        + used.cached * cached
        + (used.written - used.written_1h) * written
        + used.written_1h * written_1h
        + used.completion * price.completion
    ) / MILLION


def estimate(options: LlmOptions, prompt_bytes: int, price: Price | None) -> float:
    """An upper estimate of a request's cost in USD: one token per two bytes of prompt, and the longest allowed completion.

    Raises ConfigError without a price, since a budget cannot be enforced then.
    """
    if price is None:
        raise ConfigError(
            f"max_cost needs the price of {options.model!r}, which litellm's table does not have: give Llm(prices="
            '{"prompt": 2.0, "completion": 8.0}) in USD per million tokens, 0 for a model of your own'
        )
    parameters = options.litellm_parameters
    longest = next((parameters[name] for name in LENGTHS if isinstance(parameters.get(name), int)), LIKELY_COMPLETION)
    return cost_of(UsedTokens(prompt_bytes // 2 + 1, longest), price)
