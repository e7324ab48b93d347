"""Settings of the app's chat model that its replacement keeps. Temperature, top-p, top-k and seed belong to the training."""

from __future__ import annotations

import functools
from typing import Any, cast

from langchain_core.language_models import BaseChatModel

from .provider_formats import DROPPED, FORMATS, PROVIDER_STATE, SAME, to_openai

OURS = ("stop", "max_tokens", "n", "logprobs", "top_logprobs")
"""Fields of our chat model. What the app's model has under other names becomes `model_kwargs`."""
LANGCHAINS = ("callbacks", "tags", "metadata", "verbose", "disable_streaming")
"""Fields of every chat model that LangChain uses itself. The rate limiter is left out: it protects the other endpoint."""


def kept_settings(original: BaseChatModel) -> dict[str, Any]:
    """The fields of `original` that its replacement keeps, as if they were given at the call.

    Raises CaptureError for one that refers to the provider's service, such as a part of the prompt that is kept there.
    """
    options = {name: value for name in _options_of(type(original)) if (value := getattr(original, name)) is not None}
    extra: object = getattr(original, "model_kwargs", None)
    if isinstance(extra, dict):
        options |= cast(dict[str, Any], extra)
    converted = to_openai(options, type(original).__name__)
    kept: dict[str, Any] = {name: getattr(original, name) for name in LANGCHAINS}
    kept |= {name: converted.pop(name) for name in OURS if name in converted}
    if converted:
        kept["model_kwargs"] = converted
    if "streaming" in original.model_fields_set:
        kept["streaming"] = getattr(original, "streaming", False)
    if getattr(original, "output_version", None) == "v1":
        kept["output_version"] = "v1"
    return kept


@functools.cache
def _options_of(kind: type[BaseChatModel]) -> tuple[str, ...]:
    """The fields of a chat model class that are options of its calls."""
    return tuple(name for name in (*OURS, *SAME, *FORMATS, *DROPPED, *PROVIDER_STATE) if name in kind.model_fields)
