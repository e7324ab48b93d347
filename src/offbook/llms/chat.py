"""Chat completions of another LLM, with tools, for an app that runs on it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offbook.base.errors import ConfigError, LlmError

from .answer import ChatAnswer
from .options import LlmOptions
from .outcome import of_chat_response
from .question import Question

if TYPE_CHECKING:
    from offbook.base.types import Json, Message

logger = logging.getLogger("offbook")

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
            "%s takes no temperature=%s: it is asked at its own (%s)", options.model, sent["temperature"], reason
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
