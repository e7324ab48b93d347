"""ART's functions of answers: litellm's as OpenAI's, without logprobs, and asked again of another model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import cast

from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from offbook.base.choices import as_choice
from offbook.base.errors import ConfigError
from offbook.base.types import Json, Message, Tool

LOGPROBS = "logprobs"
Guide = tuple[list[str] | None, Message | None, list[Tool] | None]


def convert_litellm_choice_to_openai(litellm_choice: object) -> Choice:
    """The same choice as the OpenAI SDK's, with the mark of its call. `messages_and_choices` takes litellm's own too."""
    choice = as_choice(litellm_choice)
    if choice is None:
        raise ConfigError(f"litellm_choice: a choice of a finished answer is needed, got {litellm_choice!r:.200}")
    return choice


def strip_logprobs(value: object) -> object:
    """A copy without `logprobs` anywhere inside, to be stored; what is no dict, list, tuple or pydantic model is kept as
    it is. A model keeps its class, with None for its own logprobs."""
    if isinstance(value, BaseModel):
        fields = {name: None if name == LOGPROBS else strip_logprobs(field) for name, field in value}
        return value.model_copy(update=fields)
    if isinstance(value, Mapping):
        return {
            name: strip_logprobs(item)
            for name, item in cast(Mapping[object, object], value).items()
            if name != LOGPROBS
        }
    if isinstance(value, list | tuple):
        items = [strip_logprobs(item) for item in cast("list[object] | tuple[object, ...]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


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
