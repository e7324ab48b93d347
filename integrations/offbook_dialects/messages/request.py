"""A request to Anthropic's Messages as the body of a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pydantic import ValidationError

from offbook.base.types import Json, Message
from offbook.openai_dialect.chat_answer import Answer
from offbook.openai_dialect.tool_arguments import arguments_text
from offbook.server.calls.sampled_calls import TrajectoryCalls
from offbook.server.errors import ApiError, bad_request

from .fields import (
    NO_THREADS,
    REFUSED,
    WITHOUT_EFFECT,
    Image,
    MessagesRequest,
    Source,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)

BILLING = "x-anthropic-billing-header"
"""Begins a block of Claude Code's system prompt whose hash is another one in each request: no prompt would extend another."""


def chat_body(body: MessagesRequest, model: str, sampled: TrajectoryCalls) -> dict[str, Json]:
    """The body of a chat completion without its settings. Raises ApiError."""
    chat: dict[str, Json] = {"model": model, "messages": _messages(body, sampled), **_tools(body)}
    if body.thinking is not None:
        chat["thinking"] = {"type": body.thinking.type}
    if body.output_config is not None and body.output_config.effort is not None:
        chat["reasoning_effort"] = body.output_config.effort
    if _goes_on(body.messages[-1]):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def read_request(body: dict[str, Json]) -> MessagesRequest:
    """The fields of a request. Raises ApiError for what cannot be served."""
    for name, reason in REFUSED.items():
        if body.get(name):
            code = NO_THREADS if name == "thread" else "unsupported_field"
            raise ApiError(400, f"{name} is not supported: {reason}", name, code)
    known = {name: value for name, value in body.items() if name not in WITHOUT_EFFECT and name not in REFUSED}
    try:
        return MessagesRequest.model_validate(known)
    except ValidationError as error:
        raise bad_request(error, "body") from error


def settings(body: MessagesRequest) -> dict[str, Json]:
    """The settings of a chat completion. Raises ApiError."""
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens: field required", "max_tokens", "invalid_value")
    taken: dict[str, Json] = {
        "max_tokens": body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "stream_options": {"include_usage": True} if body.stream else None,
    }
    form = body.output_format or (body.output_config.format if body.output_config is not None else None)
    if form is not None:
        taken["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.schema_},
        }
    return {name: value for name, value in taken.items() if value is not None}


def _tools(body: MessagesRequest) -> dict[str, Json]:
    """The tools that are offered, and which must be called. A deferred one is hidden until a result refers to it."""
    referred = {
        part.tool_name
        for turn in body.messages
        for block in (turn.content if isinstance(turn.content, list) else ())
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
        for part in block.content
        if isinstance(part, ToolReference)
    }
    offered = [_tool(tool) for tool in body.tools or () if not tool.defer_loading or tool.name in referred]
    return {"tools": offered, **_choice(body.tool_choice)} if offered else {}


def _tool(tool: Tool) -> Answer:
    if tool.input_schema is None:
        kind = tool.type or tool.name
        message = f"tools: {kind!r} is a tool of Anthropic's own: offer a tool with an input_schema instead"
        raise ApiError(400, message, "tools", "unsupported_tool")
    if not tool.name:
        raise ApiError(400, "tools.name: field required", "tools", "invalid_value")
    function: Answer = {"name": tool.name}  # templates write the fields in this order
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> dict[str, Json]:
    if choice is None:
        return {}
    taken: dict[str, Json] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        return taken | {"tool_choice": {"type": "function", "function": {"name": choice.name or ""}}}
    return taken | {"auto": {}, "any": {"tool_choice": "required"}, "none": {"tool_choice": "none"}}[choice.type]


def _messages(body: MessagesRequest, sampled: TrajectoryCalls) -> list[Message]:
    system = [Text(type="text", text=body.system)] if isinstance(body.system, str) else body.system or []
    texts = [block.text for block in system if block.text and not block.text.startswith(BILLING)]
    messages: list[Message] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    for number, turn in _joined(body.messages):
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_assistant(turn, f"messages.{number}", sampled))
        else:
            messages += _user(turn, f"messages.{number}")
    return messages


def _joined(turns: Sequence[Turn]) -> list[tuple[int, Turn]]:
    """The turns with their numbers. A turn after one with tool calls of the same assistant is part of it, as in Anthropic's API:
    their results follow both."""
    joined: list[tuple[int, Turn]] = []
    for number, turn in enumerate(turns):
        last = joined[-1][1] if joined else turn
        if (
            turn.role == "assistant" == last.role
            and not isinstance(turn.content, str)
            and any(isinstance(block, ToolUseBlock) for block in last.content)
            and joined
        ):
            together = turn.model_copy(update={"content": [*last.content, *turn.content]})
            joined[-1] = joined[-1][0], together
        else:
            joined.append((number, turn))
    return joined


def _goes_on(last: Turn) -> bool:
    """Whether the answer continues the last turn, a text that the client put into the model's mouth."""
    if last.role != "assistant":
        return False
    if isinstance(last.content, str):
        return bool(last.content)
    return bool(last.content) and all(isinstance(block, Text) and block.text for block in last.content)


def _user(turn: Turn, field: str) -> list[Message]:
    """The results of a turn, then its images and texts: no message may part the results that answer one turn."""
    results: list[Message] = []
    parts: list[Answer] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            text, images = _result(block)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            parts += images
        elif isinstance(block, Text):
            parts += [] if block.text.startswith(BILLING) else [{"type": "text", "text": block.text}]
        elif isinstance(block, Image):
            parts.append(_image(block.source, field))
        else:
            raise ApiError(400, f"{field}: a {turn.role}'s turn has no {cast(ToolUseBlock, block).type} block", field)
    if not parts:
        return results
    plain = len(parts) == 1 and parts[0]["type"] == "text"
    return [*results, {"role": turn.role, "content": parts[0]["text"] if plain else parts}]


def _result(block: ToolResultBlock) -> tuple[str, list[Answer]]:
    if not isinstance(block.content, list):
        return block.content or "", []
    texts = [_of_result(part) for part in block.content if not isinstance(part, Image)]
    images = [_image(part.source, "tool_result") for part in block.content if isinstance(part, Image)]
    return "\n".join(texts), images


def _of_result(part: Text | ToolReference) -> str:
    return part.text if isinstance(part, Text) else f"The tool {part.tool_name} is available now."


def _image(source: Source, field: str) -> Answer:
    if not (source.url or source.data):
        raise ApiError(400, f"{field}: an image has a source of type base64 or url", field, "invalid_value")
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant(turn: Turn, field: str, sampled: TrajectoryCalls) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Answer] = []
    for block in cast(Sequence[Json], turn.content):
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            restored = sampled.restore(block.id, block.name, block.input)
            arguments = restored[1] if restored is not None else arguments_text(block.input)
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif isinstance(block, Image | ToolResultBlock):
            raise ApiError(400, f"{field}: an assistant's turn has no {block.type} block", field, "invalid_value")
    message: Message = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message
