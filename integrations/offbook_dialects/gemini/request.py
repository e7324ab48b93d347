"""A request to Gemini's `generateContent` as the body of a chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import cast

from pydantic import BaseModel

from offbook.base.types import Json, Message, Tool
from offbook.openai_dialect.tool_arguments import arguments_text
from offbook.server.calls.sampled_calls import TrajectoryCalls
from offbook.server.errors import ApiError

from .answer import read_signature
from .fields import (
    GeminiBlob,
    GeminiCall,
    GeminiConfig,
    GeminiContent,
    GeminiPart,
    GeminiResult,
    GeminiThinking,
    GeminiTool,
    GeminiToolConfig,
    GenerateContent,
)

_RESULT_KEYS = ("output", "result", "return_value")
"""Fields in which clients wrap the result of a function that is no object: Google's SDK and LangChain, Pydantic AI."""
_MODES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_WHOLE_NUMBERS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_SCHEMAS, _SCHEMA_LISTS, _NAMED_SCHEMAS = (
    ("items", "additionalProperties"),
    ("anyOf", "prefixItems"),
    ("properties", "defs"),
)
_GONE = {
    "responseLogprobs": "ask for them with chat completions",
    "cachedContent": "nothing is cached here, send the whole conversation",
    "cached_content": "nothing is cached here, send the whole conversation",
}


def chat_body(request: GenerateContent, sampled: TrajectoryCalls) -> dict[str, Json]:
    """The body of a chat completion, without `model` and `stream`. Raises ApiError 400, naming the field."""
    _known(request, "")
    body: dict[str, Json] = {"messages": _messages(request, sampled)}
    if tools := _tools(request.tools or ()):
        body["tools"] = tools
        body |= _tool_choice(request.tool_config)
    return body | _settings(request.generation_config or GeminiConfig())


def _messages(request: GenerateContent, sampled: TrajectoryCalls) -> list[Message]:
    messages: list[Message] = []
    if request.system_instruction is not None:
        messages.append({"role": "system", "content": _text_only(request.system_instruction, "systemInstruction")})
    conversation = _Conversation(sampled)
    for content in _joined(request.contents):
        messages += conversation.turn(content)
    return messages


def _joined(contents: Sequence[GeminiContent]) -> list[GeminiContent]:
    """Consecutive turns of the model as one: Google's SDK sends back every chunk of a stream as a turn."""
    joined: list[GeminiContent] = []
    for content in contents:
        if joined and content.role == "model" == joined[-1].role:
            joined[-1] = joined[-1].model_copy(update={"parts": [*joined[-1].parts, *content.parts]})
        else:
            joined.append(content)
    return joined


class _Conversation:
    """Turns as messages, in order. A result that names no call belongs to the first open call of its function."""

    def __init__(self, sampled: TrajectoryCalls) -> None:
        self._sampled = sampled
        self._open: list[tuple[str, str]] = []  # name and id of calls without a result
        self._calls = 0

    def turn(self, content: GeminiContent) -> list[Message]:
        """The messages of a turn: one of the model, or results, then what the user says."""
        for part in content.parts:
            _known(part, "contents.parts.")
        if content.role == "model":
            return [self._model(content.parts)]
        if content.role == "system":
            return [{"role": "system", "content": _text_only(content, "contents")}]
        results = [part.function_response for part in content.parts if part.function_response is not None]
        messages = [self._result(result) for result in results]
        images = [blob for result in results for blob in _images(result)]
        shown = _user_content([*(part for part in content.parts if part.function_response is None)], images)
        return messages if shown is None and messages else [*messages, {"role": "user", "content": shown or ""}]

    def _model(self, parts: Iterable[GeminiPart]) -> Message:
        text, thought, calls = "", "", list[Json]()
        for part in parts:
            if part.function_call is not None:
                calls.append(self._call(part.function_call, read_signature(part.thought_signature)))
            elif part.inline_data is not None or part.function_response is not None:
                raise _unsupported("contents.parts", "a turn of the model has text, thoughts and function calls only")
            elif part.thought:
                thought += part.text or ""
            else:
                text += part.text or ""
        message: Message = {"role": "assistant", "content": text or None}
        if thought:
            message["reasoning"] = thought
        if calls:
            message["tool_calls"] = calls
        elif not text:
            message["content"] = ""
        return message

    def _call(self, call: GeminiCall, signed: str) -> Json:
        args = call.args or {}
        self._calls += 1
        named = call.id or signed or None
        restored = self._sampled.restore(named, call.name, args) or self._sampled.restore(None, call.name, args)
        call_id, arguments = restored or (named or f"call-{self._calls}", arguments_text(args))
        if any(call_id == waiting for _, waiting in self._open):  # equal calls of clients that drop ids
            call_id = f"call-{self._calls}"
        call_id = call.id or call_id
        self._open.append((call.name, call_id))
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _result(self, result: GeminiResult) -> Message:
        known = (
            call_id for name, call_id in self._open if result.id == call_id or (not result.id and name == result.name)
        )
        call_id = next(known, None)
        if call_id is None:
            raise _unsupported(
                "contents.parts.functionResponse",
                f"no open call of {result.name!r} precedes its result (id {result.id!r})",
            )
        self._open = [item for item in self._open if item[1] != call_id]
        return {"role": "tool", "tool_call_id": call_id, "content": _result_text(result.response or {})}


def _result_text(response: dict[str, Json]) -> str:
    """A function's result as text.

    >>> _result_text({"result": "shelf 7"}), _result_text({"output": [1, 2]}), _result_text({"error": "none"})
    ('shelf 7', '[1, 2]', '{"error": "none"}')
    """
    (only,) = response if len(response) == 1 else ("",)
    value: Json = response[only] if only in _RESULT_KEYS else response
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _images(result: GeminiResult) -> list[GeminiBlob]:
    for part in result.parts:
        _known(part, "contents.parts.functionResponse.parts.")
    return [part.inline_data for part in result.parts if part.inline_data is not None]


def _user_content(parts: Iterable[GeminiPart], images: Iterable[GeminiBlob]) -> str | list[Json] | None:
    """What the user says: text, joined as it stands, or with images a list of parts; None for nothing."""
    pieces: list[Json] = []
    for part in parts:
        if part.function_call is not None:
            raise _unsupported("contents.parts.functionCall", "only a turn of role 'model' has function calls")
        if part.inline_data is not None:
            pieces.append(_image(part.inline_data))
        elif part.text is not None:
            if pieces and pieces[-1]["type"] == "text":
                pieces[-1] = {"type": "text", "text": pieces[-1]["text"] + part.text}
            else:
                pieces.append({"type": "text", "text": part.text})
    pieces += map(_image, images)
    if len(pieces) == 1 and pieces[0]["type"] == "text":
        return cast(str, pieces[0]["text"])
    return pieces or None


def _image(blob: GeminiBlob) -> Json:
    """An image as chat completions take it. Google's SDK writes base64 in the alphabet of URLs."""
    if not blob.mime_type.startswith("image/"):
        raise _unsupported("contents.parts.inlineData", f"only images can be sent inline (got {blob.mime_type!r})")
    data = blob.data.replace("-", "+").replace("_", "/")
    return {"type": "image_url", "image_url": {"url": f"data:{blob.mime_type};base64,{data}"}}


def _text_only(content: GeminiContent, field: str) -> str:
    for part in content.parts:
        _known(part, f"{field}.parts.")
        if part.text is None:
            raise _unsupported(field, "only text is allowed here")
    return "".join(part.text or "" for part in content.parts)


def _tools(tools: Iterable[GeminiTool]) -> list[Tool]:
    functions: list[Tool] = []
    for tool in tools:
        for name in _extra(tool):
            raise _unsupported(
                "tools", f"{name} runs at Google, this server has no such tool: offer a function instead"
            )
        for declared in tool.function_declarations or ():
            _known(declared, "tools.functionDeclarations.")
            schema = declared.parameters_json_schema or json_schema(declared.parameters)
            function: dict[str, Json] = {"name": declared.name}
            if declared.description is not None:
                function["description"] = declared.description
            function["parameters"] = schema or {"type": "object", "properties": {}}
            functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(config: GeminiToolConfig | None) -> dict[str, Json]:
    calling = None if config is None else config.function_calling_config
    if calling is None:
        return {}
    _known(calling, "toolConfig.functionCallingConfig.")
    mode = _MODES[calling.mode]
    if calling.allowed_function_names and mode != "none":
        named = [{"type": "function", "function": {"name": name}} for name in calling.allowed_function_names]
        allowed = {"mode": mode, "tools": named}
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    return {} if mode == "auto" else {"tool_choice": mode}


def _settings(config: GeminiConfig) -> dict[str, Json]:
    _known(config, "generationConfig.")
    settings: dict[str, Json] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": None if config.top_k is None else int(config.top_k),
        "max_tokens": config.max_output_tokens,
        "stop": config.stop_sequences or None,
        "seed": config.seed,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "n": config.candidate_count,
        "response_format": _format(config),
    }
    return {name: value for name, value in settings.items() if value is not None} | _thinking(config.thinking_config)


def _format(config: GeminiConfig) -> Json:
    schema: Json = config.response_json_schema or json_schema(config.response_schema)
    if config.response_mime_type != "application/json":
        if schema is None and config.response_mime_type != "text/x.enum":
            return None
        raise _unsupported("generationConfig.responseMimeType", "a schema needs the type 'application/json'")
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _thinking(config: GeminiThinking | None) -> dict[str, Json]:
    """A budget of 0 turns thoughts off, and a level is an effort, as far as the base's template can. Other budgets have no
    effect."""
    if config is None:
        return {}
    settings: dict[str, Json] = {}
    if config.include_thoughts is False:
        settings["include_reasoning"] = False
    if config.thinking_budget == 0:
        settings["enable_thinking"] = False
    if config.thinking_level is not None:
        settings["reasoning_effort"] = config.thinking_level.lower()
    return settings


def json_schema(schema: Json) -> Json:
    """OpenAPI's form of a schema, as Google writes it, as JSON Schema.

    >>> json_schema({"type": "OBJECT", "properties": {"type": {"type": "STRING", "nullable": True}}})
    {'type': 'object', 'properties': {'type': {'type': ['string', 'null']}}}
    """
    if not isinstance(schema, dict):
        return schema
    fields, converted = cast(dict[str, Json], schema), dict[str, Json]()
    for name, value in fields.items():
        name = _camel(name)
        if name in _SCHEMAS:
            converted[name] = json_schema(value)
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            converted[name] = [json_schema(item) for item in cast(list[Json], value)]
        elif name in _NAMED_SCHEMAS and isinstance(value, dict):
            converted[name] = {key: json_schema(item) for key, item in cast(dict[str, Json], value).items()}
        elif name == "type" and isinstance(value, str):
            converted |= {} if value == "TYPE_UNSPECIFIED" else {"type": value.lower()}
        elif name in _WHOLE_NUMBERS and isinstance(value, str) and value.isdigit():
            converted[name] = int(value)
        elif name not in ("nullable", "propertyOrdering"):
            converted[name] = value
    if fields.get("nullable") is True and isinstance(converted.get("type"), str):
        converted["type"] = [converted["type"], "null"]
    return converted


def _camel(name: str) -> str:
    first, *more = name.split("_")
    return first + "".join(part.capitalize() for part in more) if first else name


def _known(read: BaseModel, where: str) -> None:
    """Raise ApiError for a field that is not served and would change the answer."""
    for name in _extra(read):
        raise _unsupported(where + name, _GONE.get(name, "this server has no such field"))


def _extra(read: BaseModel) -> list[str]:
    return [name for name, value in (read.model_extra or {}).items() if value is not None]


def _unsupported(field: str, reason: str) -> ApiError:
    return ApiError(400, f"{field} is not supported: {reason}", field, "unsupported_field")
