"""Detects unparsed tool calls by how they begin. Needed for vLLM, which does not report parse failures."""

from __future__ import annotations

from collections.abc import Sequence, Set

from offbook.base.types import Json, Message

CALL_MARKS = ("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "<|python_tag|>", "<function=")
"""Beginnings of tool calls of Qwen, Granite, Mistral, Llama and Qwen3-Coder, as a special token or plain text."""
BARE_CALL = '{"name"'
"""Beginning of a Llama tool call without a mark."""


def looks_like_call(token_ids: Sequence[int], message: Message, mark_ids: Set[int]) -> bool:
    """Whether an answer contains the beginning of a tool call.

    `mark_ids` are the base's special tokens that equal one of CALL_MARKS. They leave no text if the engine skips special
    tokens.
    """
    if not mark_ids.isdisjoint(token_ids):
        return True
    content: Json = message.get("content")
    if not isinstance(content, str):
        return False
    return content.lstrip().startswith(BARE_CALL) or any(mark in content for mark in CALL_MARKS)
