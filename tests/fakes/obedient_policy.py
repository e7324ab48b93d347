"""A scripted policy that does what it is told: `add(a=1, b=2) then double(x=3)` are two turns of tool calls.

It reads the last user message and the tools of the request. Calls of tools that are offered become tool calls, those
before each `then` in one turn; after the last one it says what the tools said. Asked for JSON, or made to call a tool,
it fills in the schema. Otherwise it says what it heard.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from offbook.testing import Action
from offbook.testing.asgi import Body
from offbook.testing.policy_sampler import content_text

Schema = dict[str, Any]


def obey(body: Body) -> Action:
    """The answer to a request."""
    told, since = _last_order(body["messages"])
    offered = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    choice = body.get("tool_choice") or ("auto" if offered else "none")
    if choice == "none":
        offered = {}
    if isinstance(choice, dict):
        offered = {name: tool for name, tool in offered.items() if name == choice["function"]["name"]}
    turns = turns_of(told)
    done = sum(bool(message.get("tool_calls")) for message in since)
    calls = turns[done] if done < len(turns) else []
    now = tuple((name, as_sampled(arguments)) for name, arguments in calls if name in offered)
    if now:
        return Action(calls=now)
    if isinstance(choice, dict) or choice == "required":
        name, tool = next(iter(offered.items()))
        return Action(calls=((name, as_sampled(filled(tool.get("parameters") or {}))),))
    said = [content_text(message) for message in since if message["role"] == "tool"]
    text = f"the tools said {', '.join(said)}" if said else f"heard: {told}"
    return Action(text=as_json(body.get("response_format") or {}, text))


def as_sampled(arguments: Any) -> str:
    """Arguments as a model may write them, and as no program would: who sends them back must not write them anew."""
    return json.dumps(arguments, separators=(", ", ":"))


def as_json(wanted: Body, text: str) -> str:
    """The answer in the format that is asked for."""
    if wanted.get("type") == "json_schema":
        return json.dumps(filled(wanted["json_schema"]["schema"]))
    if wanted.get("type") == "json_object":
        return json.dumps({"city": "teal", "size": 7})
    return text


def turns_of(told: str) -> list[list[tuple[str, Any]]]:
    """The tool calls written in a text, turn by turn. Calls inside another call's arguments are its text."""
    turns: list[list[tuple[str, Any]]] = []
    at = 0
    for found in re.finditer(r"\b(\w+)\(", told):
        if found.start() < at:
            continue
        if not turns or " then " in told[at : found.start()]:
            turns.append([])
        at = _end_of_call(told, found.end())
        turns[-1].append((found[1], _arguments(told[found.start() : at])))
    return turns


def filled(schema: Schema, whole: Schema | None = None) -> Any:
    """The simplest value that a JSON schema allows: 7, 1.5, "teal", true, one element, every property."""
    whole = whole or schema
    if "$ref" in schema:
        return filled(whole["$defs"][schema["$ref"].rsplit("/", 1)[-1]], whole)
    if "enum" in schema or "const" in schema:
        return schema.get("const", (schema.get("enum") or [None])[0])
    if "anyOf" in schema:
        return filled(schema["anyOf"][0], whole)
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: filled(each, whole) for name, each in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [filled(schema.get("items") or {"type": "string"}, whole)]
    return {"integer": 7, "number": 1.5, "boolean": True, "null": None}.get(kind, "teal")


def _last_order(messages: list[Body]) -> tuple[str, list[Body]]:
    """The last user message's text, and the messages after it."""
    at = max((place for place, message in enumerate(messages) if message["role"] == "user"), default=None)
    return ("", messages) if at is None else (content_text(messages[at]), messages[at + 1 :])


def _end_of_call(text: str, at: int) -> int:
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def _arguments(call: str) -> dict[str, Any]:
    parsed = ast.parse(call, mode="eval").body
    assert isinstance(parsed, ast.Call)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in parsed.keywords}
