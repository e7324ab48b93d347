"""One question, one tool, and the call that answers it."""

from __future__ import annotations

from typing import Any

PARAMETERS = {"type": "object", "properties": {"order": {"type": "string"}, "days": {"type": "integer"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find_order", "description": "Where an order is.", "parameters": PARAMETERS},
}
ARGUMENTS = {"order": "4821", "days": 3}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Where is order 4821?"}]
SAID: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "find_order", "arguments": ARGUMENTS}}],
}
