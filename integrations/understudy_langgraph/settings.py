"""Settings of the app's chat model that its replacement keeps. Temperature, top-p, top-k and seed belong to the training."""

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
"""Our field -> the names of the field in the providers' classes."""
LANGCHAINS = ("callbacks", "tags", "metadata", "verbose")
"""Fields of every chat model that LangChain uses itself. The rate limiter is left out: it protects the other endpoint."""


def kept_settings(original: BaseChatModel) -> dict[str, Any]:
    """The fields of `original` that its replacement keeps."""
    kept: dict[str, Any] = {name: getattr(original, name) for name in LANGCHAINS}
    for ours, theirs in NAMES.items():
        value = next((own for name in theirs if (own := getattr(original, name, None)) is not None), None)
        if value is not None:
            kept[ours] = value
    if kept.get("max_tokens", 1) < 1:
        del kept["max_tokens"]  # Ollama's value for no limit
    if "streaming" in original.model_fields_set:
        kept["streaming"] = getattr(original, "streaming", False)
    if getattr(original, "output_version", None) == "v1":
        kept["output_version"] = "v1"
    extra: object = getattr(original, "model_kwargs", None)
    if isinstance(extra, dict) and extra:
        kept["model_kwargs"] = to_openai(cast(dict[str, Any], extra))
    return kept
