"""How tool calls begin, for engines that do not say whether they could read them all: vLLM does not."""

from __future__ import annotations

from collections.abc import Sequence, Set

from ...types import Json, Message

CALL_MARKS = ("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""In the formats of Qwen, Granite, Mistral, Llama and Qwen3-Coder: a special token, or plain text."""
BARE_CALL = '{"name"'
"""How Llama's begin where they have no mark."""


def looks_like_call(token_ids: Sequence[int], message: Message, mark_ids: Set[int]) -> bool:
    """Whether an answer holds the beginning of a tool call. `mark_ids`: those of the base's tokens that are one of
    CALL_MARKS, which leave no text where the engine skips special tokens."""
    if not mark_ids.isdisjoint(token_ids):
        return True
    content: Json = message.get("content")
    if not isinstance(content, str):
        return False
    return content.lstrip().startswith(BARE_CALL) or any(mark in content for mark in CALL_MARKS)
