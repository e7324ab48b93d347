"""A request to OpenAI's Responses as the body of a chat completion."""

from __future__ import annotations

import logging

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer
from offbook.server.dialects import DialectRequest
from offbook.server.errors import shortened

from .items import (
    Offered,
    a_list,
    a_text,
    an_object,
    earlier_messages,
    input_messages,
    results_beside_calls,
    spaced,
    unsupported,
)

logger = logging.getLogger(__name__)

KNOWN: dict[str, str | None] = {
    "model": None,
    "max_output_tokens": "max_completion_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "stream": "stream",
    "input": None,
    "instructions": None,
    "previous_response_id": None,
    "tools": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
    "text": None,
    "reasoning": None,
    "include": None,
    "background": None,
    "truncation": None,
    "top_logprobs": None,
}
WITHOUT_EFFECT = frozenset(
    {
        "client_metadata",
        "context_management",
        "generate",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "type",
        "user",
    }
)
"""Fields that concern OpenAI's own service. What is recorded is kept, whatever `store` says."""
_NEEDS = {
    "background": "responses are answered at once here",
    "conversation": "no conversations are kept here; use previous_response_id",
    "prompt": "no prompts are kept here; send instructions and input",
    "max_tool_calls": "it limits tools that run at OpenAI",
}
"""Why fields that clients may leave out are refused."""
_LEFT_OUT = ("web_search", "image_generation")
"""How the kinds of OpenAI's own tools begin that coding agents offer with each request."""
_LOGPROBS = "message.output_text.logprobs"


async def chat_body(request: DialectRequest, model: str, offered: Offered) -> dict[str, Json]:
    """The body of a chat completion; tools in another form are added to `offered`. Raises ApiError, also where an earlier response or
    item is not recorded."""
    body = request.body
    _check(body)
    chat = _taken(body)
    chat |= {"model": model, "messages": await _messages(request)} | _tools(body, offered) | _format(body)
    if effort := an_object(body.get("reasoning") or {}, "reasoning").get("effort"):
        chat["reasoning_effort"] = effort
    return chat


def _taken(body: Answer) -> dict[str, Json]:
    """The fields that a chat completion has too, under its names. Raises ApiError for a field that no one knows."""
    taken: dict[str, Json] = {}
    for name, value in body.items():
        if value is None or name in WITHOUT_EFFECT or name in _NEEDS:
            continue
        if name not in KNOWN:
            raise unsupported(f"{name} is not supported here", name)
        if (chat := KNOWN[name]) is not None:
            taken[chat] = value
    return taken


def _check(body: Answer) -> None:
    for name, reason in _NEEDS.items():
        if body.get(name):
            raise unsupported(f"{name} is not supported: {reason}", name)
    if body.get("truncation") not in (None, "disabled"):
        raise unsupported(
            f"truncation {shortened(body['truncation'])} is not supported: the next prompt would not extend this one",
            "truncation",
        )
    if body.get("top_logprobs") or _LOGPROBS in a_list(body.get("include") or [], "include"):
        raise unsupported("logprobs are not shown here: ask for chat completions", "top_logprobs")


async def _messages(request: DialectRequest) -> list[Answer]:
    body = request.body
    messages: list[Answer] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": a_text(body["instructions"], "instructions")})
    if body.get("previous_response_id") is not None:
        previous = a_text(body["previous_response_id"], "previous_response_id")
        messages += await earlier_messages(previous, request.recorded)
    sent = body.get("input")
    if isinstance(sent, str):
        return [*messages, {"role": "user", "content": sent}]
    messages += await input_messages(a_list(sent or [], "input"), request.sampled, request.recorded)
    return results_beside_calls(messages)


def _tools(body: Answer, offered: Offered) -> Answer:
    tools: list[Answer] = []
    for index, item in enumerate(a_list(body.get("tools") or [], "tools")):
        tools += _tool(an_object(item, f"tools[{index}]"), f"tools[{index}]", offered)
    if not tools:
        return {}
    taken: Answer = {"tools": tools}
    if (choice := body.get("tool_choice")) not in (None, "auto"):
        taken["tool_choice"] = _choice(choice)
    if body.get("parallel_tool_calls") is False:
        taken["parallel_tool_calls"] = False
    return taken


def _tool(tool: Answer, where: str, offered: Offered, space: str | None = None) -> list[Answer]:
    """A tool as functions. `strict` is left out unless it is given: a call with a strict tool is not trained with vLLM."""
    kind = tool.get("type")
    if kind == "namespace" and space is None:
        inner = a_list(tool.get("tools") or [], f"{where}.tools")
        space = a_text(tool.get("name"), f"{where}.name")
        inner_functions = [
            _tool(an_object(item, f"{where}.tools[{number}]"), f"{where}.tools[{number}]", offered, space)
            for number, item in enumerate(inner)
        ]
        return [function for functions in inner_functions for function in functions]
    if kind not in ("function", "custom"):
        if isinstance(kind, str) and kind.startswith(_LEFT_OUT):
            logger.info(
                "%s: OpenAI's own tool %r is not available here, so it is not offered to the model", where, kind
            )
            return []
        raise unsupported(f"{where}: OpenAI's own tool {kind!r} is not available here; offer a function", where)
    name = a_text(tool.get("name"), f"{where}.name")
    shown = name if space is None else spaced(space, name)
    if space is not None:
        offered.spaces[shown] = space, name
    function: Answer = {"name": shown}
    kept = ("description", "parameters", "strict") if kind == "function" else ("description",)
    function |= {field: tool[field] for field in kept if tool.get(field) is not None}
    if kind == "custom":
        offered.custom.add(shown)
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        function["parameters"] = text
    return [{"type": "function", "function": function}]


def _choice(choice: Json) -> Json:
    if isinstance(choice, str):
        return choice
    chosen = an_object(choice, "tool_choice")
    match chosen.get("type"):
        case "function" | "custom":
            return _named(chosen, "tool_choice")
        case "allowed_tools":
            tools = a_list(chosen.get("tools"), "tool_choice.tools")
            named = [_named(an_object(tool, "tool_choice.tools"), "tool_choice.tools") for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": chosen.get("mode"), "tools": named}}
        case kind:
            raise unsupported(f"the tool choice {shortened(kind)} is not supported: choose a function", "tool_choice")


def _named(tool: Answer, where: str) -> Answer:
    name = a_text(tool.get("name"), f"{where}.name")
    if (space := tool.get("namespace")) is not None:
        name = spaced(a_text(space, f"{where}.namespace"), name)
    return {"type": "function", "function": {"name": name}}


def _format(body: Answer) -> Answer:
    text = an_object(body.get("text") or {}, "text")
    form = an_object(text.get("format") or {"type": "text"}, "text.format")
    kind = form.get("type")
    if kind == "text":
        return {}
    if kind != "json_schema":
        return {"response_format": {"type": kind}}
    names = ("name", "schema", "strict", "description")
    schema = {name: form[name] for name in names if form.get(name) is not None}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
