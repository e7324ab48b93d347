"""Stands for `art.guided_completion`: a teacher's answer as what a student is forced to say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from openai.types.chat import ChatCompletion

from offbook.base.errors import ConfigError
from offbook.base.types import Json, Message, Tool

from .modules import names_in

__getattr__ = names_in(__name__)

Guide = tuple[list[str] | None, Message | None, list[Tool] | None]


def get_guided_completion_params(
    completion: ChatCompletion, base_tools: Iterable[Mapping[str, Json]] | None = None
) -> Guide:
    """(guided_choice, tool_choice, tools) that make another model answer as `completion` does: one of them for a text, the
    other two, with every argument fixed, for a tool call. Raises ConfigError where it has neither, or the tool is unknown.
    """
    message = completion.choices[0].message
    if not message.tool_calls:
        if message.content is None:
            raise ConfigError("completion: it has no text and no tool call to repeat")
        return [message.content], None, None
    function: dict[str, Json] = message.tool_calls[0].model_dump()["function"]
    tools = [tool for tool in base_tools or () if tool["function"]["name"] == function["name"]]
    if not tools:
        raise ConfigError(f"base_tools: the completion calls {function['name']!r}, which is not among them")
    arguments: dict[str, Json] = json.loads(function["arguments"])
    schema = {
        "type": "object",
        "properties": {name: {"enum": [value]} for name, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    fixed = {**tools[0], "function": {**tools[0]["function"], "parameters": schema}}
    return None, {"type": "function", "function": {"name": function["name"]}}, [fixed]
