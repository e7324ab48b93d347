"""Tools that answer with recorded results, so that an app can be run again on its traffic without changing anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langchain_core.tools import tool as tool_of
from pydantic import BaseModel, ValidationError

from offbook.base.errors import ConfigError
from offbook.base.json_files import parse_json
from offbook.base.types import Message
from offbook.supervised.conversations import Rows, read_conversations

Results = Mapping[str, Any]
"""The content of a result by the call's arguments, as JSON with sorted keys."""


def replayed_tools(tools: Sequence[BaseTool | Callable[..., object]], recorded: str | Path | Rows) -> list[BaseTool]:
    """These tools with their names, descriptions and arguments. Instead of running, each answers what it answered to the same
    arguments in recorded conversations.

    Bind them in place of tools that write, and an app can be trained or compared on its traffic without changing anything. A
    call with other arguments gets a failed result that says so, and the model sees it. If conversations differ, the last one
    counts, and in it the first result.

    `recorded`: the JSONL file of `offbook traces conversations`, or rows with `messages` in OpenAI's format. Raises ConfigError
    for one that cannot be read, and for a tool without any recorded result.
    """
    conversations = read_conversations(recorded, filter=lambda text: text).conversations
    named = [tool if isinstance(tool, BaseTool) else tool_of(tool) for tool in tools]
    results = {tool.name: _results(tool, [conversation.messages for conversation in conversations]) for tool in named}
    if missing := [name for name, known in results.items() if not known]:
        raise ConfigError(
            f"recorded: no result of {', '.join(missing)} in {len(conversations)} conversations: record traffic that calls it, "
            "or leave it out"
        )
    return [_replayed(tool, results[tool.name]) for tool in named]


def _results(tool: BaseTool, conversations: Sequence[Sequence[Message]]) -> Results:
    known: dict[str, Any] = {}
    for messages in conversations:
        said = {str(message.get("tool_call_id")): message.get("content") for message in messages if _is_result(message)}
        own: dict[str, Any] = {}
        for message in messages:
            for call in cast("list[Any]", message.get("tool_calls") or []):
                if call["function"]["name"] == tool.name and call["id"] in said:
                    with suppress(ValueError):  # a call whose arguments are not JSON was never run
                        key = _key(tool, parse_json(call["function"]["arguments"] or "{}"))
                        own.setdefault(key, said[call["id"]])
        known |= own
    return known


def _is_result(message: Message) -> bool:
    return message["role"] == "tool"


def _replayed(tool: BaseTool, results: Results) -> BaseTool:
    def replay(**arguments: Any) -> Any:
        key = _key(tool, arguments)
        if key not in results:
            raise ToolException(
                f"{tool.name}: no result is recorded for the arguments {key}: {len(results)} other calls are"
            )
        return results[key]

    return StructuredTool(
        name=tool.name,
        description=tool.description,
        args_schema=tool.args_schema or tool.get_input_schema(),
        func=replay,
        handle_tool_error=True,
        return_direct=tool.return_direct,
    )


def _key(tool: BaseTool, arguments: Mapping[str, Any]) -> str:
    """The arguments that a model gives, with defaults, and without what the app injects."""
    schema: Any = tool.tool_call_schema
    given = dict(arguments)
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        asked = {name: value for name, value in given.items() if name in schema.model_fields}
        try:
            given = schema.model_validate(asked).model_dump(mode="json")
        except ValidationError:
            given = asked  # a recorded call that failed; none that runs has these arguments
    return json.dumps(given, sort_keys=True, ensure_ascii=False, default=str)
