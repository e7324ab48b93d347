"""The only module that imports litellm.

litellm translates requests for providers, authenticates and counts tokens. Its retries, caching and schema handling are not
used.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.numbers import usd
from offbook.base.redaction import guard_logs

from .answer import Tokens
from .options import LlmOptions
from .outcome import Outcome, of_exception, of_response
from .prices import Table, cost_of, price_of, table_name
from .usage import used_tokens

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

ResponseReader = Callable[[Any, Tokens | None, float | None], Outcome]
"""(litellm's response, tokens, cost in USD) -> the outcome of the request."""


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
