"""Anthropic's Messages API: `/v1/messages`, and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import orjson
from pydantic import ValidationError

from offbook.base.server_sent_events import EVENT_STREAM, event
from offbook.base.types import Json, Message
from offbook.openai_dialect.chat_answer import Answer
from offbook.openai_dialect.tool_arguments import arguments_object, arguments_text

from ..calls.sampled_calls import TrajectoryCalls
from ..errors import ApiError, bad_request
from .dialect import DialectRequest, Translation
from .messages_fields import (
    NO_THREADS,
    REFUSED,
    WITHOUT_EFFECT,
    Document,
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
    client_tool,
    refused,
)

BILLING = "x-anthropic-billing-header"
"""Begins a block of Claude Code's system prompt whose hash is another one in each request: no prompt would extend another."""
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Messages:
    """The dialect. The group `count` of a path means that only the prompt's tokens are counted."""

    async def translate(self, request: DialectRequest) -> Translation:
        """The chat completion of a request. Raises ApiError."""
        asked = _read(request.body)
        model = asked.model or request.path.get("model")
        if not model:
            raise ApiError(400, "model: name one", "model", "invalid_value")
        chat: dict[str, Json] = {"model": model, "messages": _messages(asked, request.said), **_tools(asked)}
        if asked.thinking is not None:
            chat["thinking"] = {"type": asked.thinking.type}
        if asked.output_config is not None and asked.output_config.effort is not None:
            chat["reasoning_effort"] = asked.output_config.effort
        if _goes_on(asked.messages[-1]):
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.path.get("count"):
            return Translation(chat | {"max_tokens": 1}, MessagesCount(model), recorded=False)
        if asked.max_tokens is None:
            raise ApiError(400, "max_tokens: field required", "max_tokens", "invalid_value")
        chat |= _settings(asked)
        return Translation(chat, MessagesAnswer(model))

    def refusal(self, error: ApiError) -> Answer:
        """An error in Anthropic's format."""
        return _error(error)


def _read(body: dict[str, Json]) -> MessagesRequest:
    for name, reason in REFUSED.items():
        if body.get(name):
            code = NO_THREADS if name == "thread" else "unsupported_field"
            raise ApiError(400, f"{name} is not supported: {reason}", name, code)
    known = {name: value for name, value in body.items() if name not in WITHOUT_EFFECT and name not in REFUSED}
    try:
        return MessagesRequest.model_validate(known)
    except ValidationError as error:
        raise bad_request(error, "body") from error


def _settings(asked: MessagesRequest) -> dict[str, Json]:
    settings: dict[str, Json] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "stop": asked.stop_sequences or None,
        "stream": asked.stream,
        "stream_options": {"include_usage": True} if asked.stream else None,
    }
    form = asked.output_format or (asked.output_config.format if asked.output_config is not None else None)
    if form is not None:
        settings["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.schema_},
        }
    return {name: value for name, value in settings.items() if value is not None}


def _tools(asked: MessagesRequest) -> dict[str, Json]:
    """The tools that are offered, and which must be called. A deferred one is hidden until a result refers to it."""
    found = {
        part.tool_name
        for turn in asked.messages
        for block in (turn.content if isinstance(turn.content, list) else ())
        if isinstance(block, ToolResultBlock) and isinstance(block.content, list)
        for part in block.content
        if isinstance(part, ToolReference)
    }
    offered = [_tool(tool) for tool in asked.tools or () if not tool.defer_loading or tool.name in found]
    return {"tools": offered, **_choice(asked.tool_choice)} if offered else {}


def _tool(tool: Tool) -> Answer:
    description, schema = tool.description, tool.input_schema
    if schema is None:
        if (own := client_tool(tool.type or "", tool.model_extra or {})) is None:
            raise ApiError(400, f"tools: {refused(tool.type or tool.name)}", "tools", "unsupported_tool")
        description, schema = own
    if not tool.name:
        raise ApiError(400, "tools.name: field required", "tools", "invalid_value")
    function: Answer = {"name": tool.name}  # templates write the fields in this order
    if description:
        function["description"] = description
    function["parameters"] = schema
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


def _messages(asked: MessagesRequest, said: TrajectoryCalls) -> list[Message]:
    system = [Text(type="text", text=asked.system)] if isinstance(asked.system, str) else asked.system or []
    texts = [block.text for block in system if block.text and not block.text.startswith(BILLING)]
    messages: list[Message] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    for number, turn in _joined(asked.messages):
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_assistant(turn, f"messages.{number}", said))
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
        elif isinstance(block, Document):
            parts.append({"type": "text", "text": _document(block.source, field)})
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
    if source.type == "text" or not (source.url or source.data):
        raise ApiError(400, f"{field}: an image has a source of type base64 or url", field, "invalid_value")
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(source: Source, field: str) -> str:
    if source.type != "text" or source.data is None:
        raise ApiError(
            400, f"{field}: of documents only plain text is read (source.type text)", field, "unsupported_field"
        )
    return source.data


def _assistant(turn: Turn, field: str, said: TrajectoryCalls) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Answer] = []
    for block in cast(Sequence[Json], turn.content):
        if isinstance(block, Text):
            texts.append(block.text)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            restored = said.restore(block.id, block.name, block.input)
            arguments = restored[1] if restored is not None else arguments_text(block.input)
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}})
        elif isinstance(block, Image | Document | ToolResultBlock):
            raise ApiError(400, f"{field}: an assistant's turn has no {block.type} block", field, "invalid_value")
    message: Message = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


class MessagesAnswer:
    """The answer to one request. In a stream one content block is open at a time."""

    media_type = f"{EVENT_STREAM}; charset=utf-8"

    def __init__(self, model: str) -> None:
        self._model = model
        self._call_id = ""
        self._number = -1  # of the open block
        self._open: str | None = None  # its type
        self._tool: int | None = None  # the index of the open tool call
        self._arguments: list[str] = []
        self._last: Answer = {}
        self._usage: Answer = {}

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The complete message."""
        choice = cast(Answer, completion["choices"][0])
        message = cast(Answer, choice["message"])
        content: list[Answer] = []
        if thought := message.get("reasoning") or message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": call_id})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in cast(list[Answer], message.get("tool_calls") or []):
            shown = arguments_object(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": shown})
        usage = _counts(completion.get("usage") or {})
        return {**self._head(call_id), "content": content, **_stop(choice), "usage": usage}

    def start(self, call_id: str) -> bytes:
        """The event message_start."""
        self._call_id = call_id
        return _event("message_start", {"message": {**self._head(call_id), "usage": _counts({})}})

    def feed(self, chunk: Answer) -> bytes:
        """The events of a chunk. A tool call's arguments come at its end: broken JSON would break the client."""
        self._usage = chunk.get("usage") or self._usage
        events = b""
        for choice in cast(list[Answer], chunk.get("choices") or []):
            delta = cast(Answer, choice.get("delta") or {})
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                events += self._delta({"type": "thinking_delta", "thinking": thought})
            if delta.get("content"):
                events += self._block("text", {"type": "text", "text": ""})
                events += self._delta({"type": "text_delta", "text": delta["content"]})
            for part in cast(list[Answer], delta.get("tool_calls") or []):
                events += self._call(part)
            if choice.get("finish_reason") is not None:
                self._last = choice
        return events

    def end(self) -> bytes:
        """The end of the open block, why the answer ended, and message_stop."""
        closing = self._close()
        last = _event("message_delta", {"delta": _stop(self._last), "usage": _counts(self._usage)})
        return closing + last + _event("message_stop", {})

    def error(self, error: ApiError) -> bytes:
        """The event error."""
        return event(orjson.dumps(_error(error)), "error")

    def refusal(self, error: ApiError) -> Answer:
        """The error in Anthropic's format."""
        return _error(error)

    def _head(self, call_id: str) -> Answer:
        return {
            "id": f"msg_{call_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list[Json](),
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _call(self, part: Answer) -> bytes:
        function, index = cast(Answer, part.get("function") or {}), part.get("index") or 0
        events = b""
        if self._open != "tool_use" or self._tool != index:
            events = self._close()
            self._tool = index
            block: Answer = {
                "type": "tool_use",
                "id": part.get("id") or "",
                "name": function.get("name") or "",
                "input": dict[str, Json](),
            }
            events += self._block("tool_use", block)
        self._arguments.append(function.get("arguments") or "")
        return events

    def _block(self, kind: str, block: Answer) -> bytes:
        if self._open == kind:
            return b""
        closing = self._close()
        self._open, self._number = kind, self._number + 1
        return closing + _event("content_block_start", {"index": self._number, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta({"type": "signature_delta", "signature": self._call_id})
        if self._open == "tool_use":
            raw, self._arguments = "".join(self._arguments), []
            shown = orjson.dumps(arguments_object(raw)).decode()
            events = self._delta({"type": "input_json_delta", "partial_json": shown})
        self._open = None
        return events + _event("content_block_stop", {"index": self._number})

    def _delta(self, delta: Answer) -> bytes:
        return _event("content_block_delta", {"index": self._number, "delta": delta})


class MessagesCount(MessagesAnswer):
    """The number of a prompt's tokens, by a call that samples a single token: exact in every engine and for every template."""

    def whole(self, completion: Answer, call_id: str) -> Answer:
        """The number."""
        return {"input_tokens": completion["usage"]["prompt_tokens"]}


def _event(name: str, data: Answer) -> bytes:
    return event(orjson.dumps({"type": name, **data}), name)


def _stop(choice: Answer) -> Answer:
    reason = _STOPS.get(choice.get("finish_reason") or "stop", "end_turn")
    matched = choice.get("stop_reason")
    if isinstance(matched, str) and reason == "end_turn":
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": reason, "stop_sequence": None}


def _counts(usage: Answer) -> Answer:
    cached = cast(Answer, usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": max(0, (usage.get("prompt_tokens") or 0) - cached),
        "output_tokens": usage.get("completion_tokens") or 0,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _error(error: ApiError) -> Answer:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    said: Answer = {"type": kind, "message": str(error)}
    if error.code == NO_THREADS:
        said["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": said}
