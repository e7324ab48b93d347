"""Completions of a prompt (`/v1/completions`), whole and as the chunks of a stream, as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .chat_answer import Answer

COMPLETION = "text_completion"
"""The value of `object`, of a whole completion and of a chunk."""
DEFAULT_TOKENS = 16
"""OpenAI's and vLLM's `max_tokens` of a completion without one."""
OF_CHATS = frozenset(
    [
        "top_logprobs",
        "max_completion_tokens",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "include_reasoning",
    ]
)
"""Fields of every sampling request that a completion of a prompt does not have."""


class CompletionChoice(BaseModel):
    """One choice of a completion."""

    model_config = ConfigDict(extra="allow")

    index: int
    finish_reason: str | None
    text: str


class TextCompletion(BaseModel):
    """A completion of a prompt that is not streamed, in OpenAI's format."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


def completion_logprobs(tokens: Iterable[tuple[str, float, Mapping[str, float]]], start: int = 0) -> Answer:
    """The logprobs of tokens: text, logprob and the likeliest tokens. `start`: where the first one begins in the text.

    >>> completion_logprobs([("a", -0.5, {}), ("bc", -1.0, {})], 3)["text_offset"]
    [3, 4]
    """
    known = list(tokens)
    offsets: list[int] = []
    for text, _, _ in known:
        offsets.append(start)
        start += len(text)
    return {
        "tokens": [text for text, _, _ in known],
        "token_logprobs": [logprob for _, logprob, _ in known],
        "top_logprobs": [dict(top) for _, _, top in known],
        "text_offset": offsets,
    }
