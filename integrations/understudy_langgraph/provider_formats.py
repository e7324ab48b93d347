"""Tools, tool choices and options as other providers write them, brought to OpenAI's chat-completions form."""

from __future__ import annotations

from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

NOT_PASSED_ON = frozenset({"temperature", "seed"})
"""The app's choices that belong to the training while it is captured."""
PROVIDER_ONLY = frozenset(
    {"model", "model_name", "thinking", "betas", "mcp_servers", "cache_control", "stream_usage", "reasoning", "include"}
)
"""Keyword arguments that mean something to one provider only, or name the original model."""


def to_openai(arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call on the original model, as ours takes them."""
    kept = {name: value for name, value in arguments.items() if name not in PROVIDER_ONLY | NOT_PASSED_ON}
    if kept.get("tools"):
        kept["tools"] = [convert_to_openai_tool(tool) for tool in kept["tools"]]
    choice: str | bool | dict[str, Any] | None = kept.get("tool_choice")
    if choice is None:
        return kept
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        kept["parallel_tool_calls"] = False
    kept["tool_choice"] = to_openai_choice(choice)
    return kept


def to_openai_choice(choice: str | bool | dict[str, Any]) -> str | dict[str, Any]:
    """`"any"`, True, a bare tool name and Anthropic's dicts become `required`, `auto`, `none` or a named function."""
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "tool":
            return {"type": "function", "function": {"name": choice["name"]}}
        if kind in ("auto", "any", "none"):
            return "required" if kind == "any" else kind
        return choice
    if choice is True or choice == "any":
        return "required"
    if choice is False:
        return "none"
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}
