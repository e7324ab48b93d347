"""Settings of the app's model that its stand-in keeps. Not temperature, top-p, top-k or seed: they belong to the training."""

from __future__ import annotations

from typing import Any, cast

from langchain_core.language_models import BaseChatModel

from .provider_formats import to_openai

NAMES = {
    "stop": ("stop", "stop_sequences"),
    "max_tokens": ("max_tokens", "max_output_tokens", "num_predict"),
    "n": ("n",),
    "logprobs": ("logprobs",),
    "top_logprobs": ("top_logprobs",),
    "disable_streaming": ("disable_streaming",),
}
"""Ours -> what providers' classes call it."""
LANGCHAINS = ("callbacks", "tags", "metadata", "verbose")
"""What every chat model has for LangChain's own use. Not its rate limiter: that spares another endpoint."""


def carried(original: BaseChatModel) -> dict[str, Any]:
    """What a stand-in for `original` is made with."""
    kept: dict[str, Any] = {name: getattr(original, name) for name in LANGCHAINS}
    for ours, theirs in NAMES.items():
        value = next((found for name in theirs if (found := getattr(original, name, None)) is not None), None)
        if value is not None:
            kept[ours] = value
    if kept.get("max_tokens", 1) < 1:
        del kept["max_tokens"]  # Ollama's word for no limit
    if "streaming" in original.model_fields_set:
        kept["streaming"] = getattr(original, "streaming", False)
    if getattr(original, "output_version", None) == "v1":
        kept["output_version"] = "v1"
    extra: object = getattr(original, "model_kwargs", None)
    if isinstance(extra, dict) and extra:
        kept["model_kwargs"] = to_openai(cast(dict[str, Any], extra))
    return kept
