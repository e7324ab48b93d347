"""The same conversation in every API is the same chat, so that its prompt has the same tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbook.openai_dialect.tool_arguments import arguments_object
from offbook.server.calls.sampled_calls import SampledCalls, TrajectoryCalls
from offbook.server.dialects import Dialect, DialectRequest
from offbook_dialects.gemini import Gemini
from offbook_dialects.messages import Messages
from offbook_dialects.responses import Responses

FUZZED = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
SCHEMA = {"type": "object", "properties": {"box": {"type": "integer"}}}
VALUES = st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), max_size=3)  # fmt: skip
RAWS = (
    st.sampled_from(['{"box":7 }', '{"box" : 7,\n "box":8}', "", "{", "[1]", '{"a": 1.0}', '{"a": "\\u00e9"}'])
    | VALUES.map(lambda value: json.dumps(value, separators=(" , ", ":  ")))
    | VALUES.map(lambda value: json.dumps(value, ensure_ascii=False, sort_keys=True))
)
TURNS = st.tuples(
    st.none() | st.text(min_size=1),  # the thought
    st.text(),
    st.lists(st.tuples(RAWS, st.text(), st.booleans()), max_size=3),  # calls, their results, whether those are errors
    st.text(min_size=1),  # what the user says next, if nothing was called
)
CONVERSATIONS = st.tuples(st.none() | st.text(min_size=1), st.lists(TURNS, min_size=1, max_size=4))


def chat(system: str | None, turns: list[Any]) -> list[Any]:
    """The messages as a client of chat completions sends them."""
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": "Where is box 7?"})
    for number, (thought, text, calls, next_) in enumerate(turns):
        answer: Any = {"role": "assistant", "content": text or (None if calls else "")}
        if thought is not None:
            answer["reasoning"] = thought
        ids = [f"call-{number}-{index}" for index in range(len(calls))]
        made = [
            {"id": name, "type": "function", "function": {"name": "look_up", "arguments": raw}}
            for name, (raw, _, _) in zip(ids, calls, strict=True)
        ]
        messages.append(answer | ({"tool_calls": made} if made else {}))
        messages += [
            {"role": "tool", "tool_call_id": name, "content": result}
            for name, (_, result, _) in zip(ids, calls, strict=True)
        ]
        if not calls:
            messages.append({"role": "user", "content": next_})
    return messages


def as_messages(system: str | None, turns: list[Any]) -> dict[str, Any]:
    contents: list[Any] = [{"role": "user", "content": "Where is box 7?"}]
    for number, (thought, text, calls, next_) in enumerate(turns):
        blocks: list[Any] = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        blocks += [{"type": "text", "text": text}] if text else []
        results: list[Any] = []
        for index, (raw, result, failed) in enumerate(calls):
            name = f"call-{number}-{index}"
            blocks.append({"type": "tool_use", "id": name, "name": "look_up", "input": arguments_object(raw)})
            parts = [{"type": "text", "text": result}] if result else []
            results.append({"type": "tool_result", "tool_use_id": name, "content": parts, "is_error": failed})
        contents.append({"role": "assistant", "content": blocks})
        contents.append({"role": "user", "content": results or next_})
    tools = [{"name": "look_up", "description": "d", "input_schema": SCHEMA}]
    return {"model": "m", "max_tokens": 9, "messages": contents, "tools": tools} | (
        {"system": system} if system else {}
    )


def as_gemini(system: str | None, turns: list[Any]) -> dict[str, Any]:
    contents: list[Any] = [{"role": "user", "parts": [{"text": "Where is box 7?"}]}]
    for number, (thought, text, calls, next_) in enumerate(turns):
        parts: list[Any] = [{"text": thought, "thought": True}] if thought else []
        parts += [{"text": text}] if text or not (calls or thought) else []
        results: list[Any] = []
        for index, (raw, result, _) in enumerate(calls):
            name = {"id": f"call-{number}-{index}", "name": "look_up"}
            parts.append({"functionCall": name | {"args": arguments_object(raw)}})
            results.append({"functionResponse": name | {"response": {"result": result}}})
        contents += [{"role": "model", "parts": parts}, {"role": "user", "parts": results or [{"text": next_}]}]
    tools = [{"functionDeclarations": [{"name": "look_up", "description": "d", "parametersJsonSchema": SCHEMA}]}]
    instruction = {"systemInstruction": {"parts": [{"text": system}]}} if system else {}
    return {"contents": contents, "tools": tools} | instruction


def as_responses(system: str | None, turns: list[Any]) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": "Where is box 7?"}]
    for number, (thought, text, calls, next_) in enumerate(turns):
        if thought:
            items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
        if text or not calls:
            content = [{"type": "output_text", "text": text, "annotations": []}]
            items.append({"type": "message", "role": "assistant", "content": content})
        outputs: list[Any] = []
        for index, (raw, result, _) in enumerate(calls):
            name = f"call-{number}-{index}"
            written = json.dumps(arguments_object(raw))
            items.append({"type": "function_call", "call_id": name, "name": "look_up", "arguments": written})
            outputs.append({"type": "function_call_output", "call_id": name, "output": result})
        items += outputs or [{"role": "user", "content": [{"type": "input_text", "text": next_}]}]
    tools = [{"type": "function", "name": "look_up", "description": "d", "parameters": SCHEMA}]
    return {"model": "m", "input": items, "tools": tools} | ({"instructions": system} if system else {})


def translated(dialect: Dialect, body: dict[str, Any], said: TrajectoryCalls) -> dict[str, Any]:
    path = {"named": "m", "action": "generateContent"}
    sent = json.loads(json.dumps(body))  # as a client writes it
    request = DialectRequest(sent, path, {}, said, cast(SampledCalls, None))
    return asyncio.run(dialect.translate(request)).body


APIS = pytest.mark.parametrize(
    ("dialect", "written"),
    [(Messages(), as_messages), (Gemini(), as_gemini), (Responses(), as_responses)],
    ids=["messages", "gemini", "responses"],
)


@APIS
@FUZZED
@given(conversation=CONVERSATIONS)
def test_the_same_conversation_is_the_same_chat(dialect: Dialect, written: Any, conversation: Any) -> None:
    expected = chat(*conversation)
    said = TrajectoryCalls()
    for message in expected:
        said.add(message)
    body = translated(dialect, written(*conversation), said)
    assert body["messages"] == expected
    function = {"name": "look_up", "description": "d", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    assert json.dumps(body["tools"]) == json.dumps(tools)  # templates write the fields in their order


@APIS
def test_without_what_was_sampled_it_is_another_chat(dialect: Dialect, written: Any) -> None:
    conversation: Any = (None, [(None, "", [('{"box":7 }', "here", False)], "")])
    body = translated(dialect, written(*conversation), TrajectoryCalls())
    assert body["messages"] != chat(*conversation)
