"""Prices by the requested model name. The name in the server's response may be anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbook.base.errors import ConfigError

from .answer import Tokens
from .options import LlmOptions, Price

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


def price_of(options: LlmOptions, table: Table) -> Price | None:
    """The price from the options, else from the table; None if unknown."""
    if options.prices is not None:
        return options.prices
    name = table_name(options.model, table)
    if name is None:
        return None
    entry = table[name]
    prompt, completion = entry.get("input_cost_per_token"), entry.get("output_cost_per_token")
    if prompt is None or completion is None:
        return None
    cached = entry.get("cache_read_input_token_cost")
    return Price(
        prompt=prompt * MILLION,
        completion=completion * MILLION,
        cached_prompt=None if cached is None else cached * MILLION,
    )


def cost_of(tokens: Tokens, cached_prompt: int, price: Price) -> float:
    """The cost of one answer in USD. `cached_prompt` is the number of prompt tokens in the provider's cache."""
    cached_price = price.prompt if price.cached_prompt is None else price.cached_prompt
    full = tokens.prompt - cached_prompt
    return (full * price.prompt + cached_prompt * cached_price + tokens.completion * price.completion) / MILLION


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
    return cost_of(Tokens(prompt_bytes // 2 + 1, longest), 0, price)
