"""Answers under a grammar: forced tool calls, schemas, and one or the other."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from offbook.base.types import Json
from offbook.engine.inference.decoding.model import ModelRunner
from tests.engine.inference.engines import SPECIAL
from tests.engine.inference.served import SCHEMA, TOOLS, chat, events, says


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "close_box"}}])
def test_a_forced_tool_choice_is_a_call_of_that_tool(http: httpx.Client, choice: Json, streamed: bool) -> None:
    fields: dict[str, Json] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    if streamed:
        parts = [chunk["choices"][0] for chunk in events(http, **fields)]
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0]
        finish = parts[-1]["finish_reason"]
    else:
        answer = chat(http, **fields)["choices"][0]
        calls, finish = answer["message"]["tool_calls"], answer["finish_reason"]
        assert answer["message"]["content"] is None
        assert answer["parse_failure"] is False
    assert finish == "tool_calls"
    (call,) = calls
    assert call["function"]["name"] in (["close_box"] if isinstance(choice, dict) else ["open_box", "close_box"])
    assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_a_tag_inside_an_argument_is_part_of_the_argument(
    http: httpx.Client, policy: ModelRunner, monkeypatch: pytest.MonkeyPatch, forced: bool, streamed: bool
) -> None:
    text = "a</tool_call>b"
    properties: Json = {"text": {"type": "string", "enum": [text]}}
    say: Json = {"name": "say", "parameters": {"type": "object", "properties": properties, "required": ["text"]}}
    fields: dict[str, Json] = {"tools": [{"type": "function", "function": say}], "max_tokens": 200}
    if forced:
        fields |= {"tool_choice": {"type": "function", "function": {"name": "say"}}, "parallel_tool_calls": False}
    with monkeypatch.context() as patched:
        if not forced:
            says(policy, patched, f'<tool_call>\n{{"name": "say", "arguments": {{"text": "{text}"}}}}\n</tool_call>')
        if streamed:
            parts = [chunk["choices"][0] for chunk in events(http, **fields)]
            calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
            content, last = "".join(part["delta"].get("content", "") for part in parts), parts[-1]
        else:
            last = chat(http, **fields)["choices"][0]
            calls, content = last["message"]["tool_calls"], last["message"]["content"] or ""
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"text": text}]
    assert (content, last["finish_reason"], last["parse_failure"]) == ("", "tool_calls", False)


def test_an_answer_in_a_schema_is_json_of_that_schema(http: httpx.Client) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    answer = chat(http, response_format=shape, max_tokens=400)["choices"][0]
    assert json.loads(answer["message"]["content"]).keys() == {"ok"}
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("shaped", ["json", "call", "json or call"])
def test_a_policy_that_prefers_blanks_gets_one_between_the_tokens_of_json(
    http: httpx.Client, policy: ModelRunner, shaped: str
) -> None:
    size: Json = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    schema: Json = {"type": "object", "properties": {"on": size}, "required": ["on"], "additionalProperties": False}
    tool: Json = {"type": "function", "function": {"name": "switch", "parameters": schema}}
    fields: dict[str, Json] = {"parallel_tool_calls": False, "max_tokens": 100}
    if shaped != "call":
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    if shaped != "json":
        fields |= {"tools": [tool]} | ({"tool_choice": "required"} if shaped == "call" else {})
    texts = [str(policy.tokenizer.decode([token])) for token in range(len(policy.tokenizer))]
    begin = policy.tokenizer.convert_tokens_to_ids("{" if shaped != "call" else "<tool_call>")
    bias = {str(token): 30 for token, text in enumerate(texts) if text and not text.strip(" \n\r\t")} | {str(begin): 60}
    answer = chat(http, **fields, logit_bias=bias, return_token_ids=True)["choices"][0]
    text = str(policy.tokenizer.decode(answer["token_ids"]))
    json_text = text[text.index("{") :]
    assert re.search(r"\s", json_text) and not re.search(r"\s\s", json_text), json_text


@pytest.mark.parametrize("texts", [["<move>A1</move>"], ["yes", "no", "it is {not} known"]])
def test_an_answer_is_one_of_the_texts_to_choose_from(http: httpx.Client, texts: list[str]) -> None:
    answer = chat(http, structured_outputs={"choice": texts}, max_tokens=60)["choices"][0]
    assert answer["message"]["content"] in texts and answer["finish_reason"] == "stop"


@pytest.mark.parametrize("forced", [False, True])
def test_under_a_grammar_control_tokens_only_begin_and_end_calls(
    http: httpx.Client, policy: ModelRunner, forced: bool
) -> None:
    schema: Json = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 5, "maxLength": 20}},
        "required": ["text"],
        "additionalProperties": False,
    }
    shape: Json = {"type": "json_schema", "json_schema": {"schema": schema}}
    tool: Json = {"type": "function", "function": {"name": "say", "parameters": schema}}
    shaped: dict[str, Json] = {"tools": [tool], "tool_choice": "required"} if forced else {"response_format": shape}
    marks = [policy.tokenizer.convert_tokens_to_ids(text) for text in (*SPECIAL, "<tool_call>", "</tool_call>")]
    bias = {str(mark): 100 for mark in marks}
    answer = chat(http, **shaped, parallel_tool_calls=False, max_tokens=300, logit_bias=bias, return_token_ids=True)
    choice = answer["choices"][0]
    assert [token for token in choice["token_ids"] if token in marks] == (
        [*marks[3:], marks[2]] if forced else [marks[2]]
    )
    said = choice["message"]["tool_calls"][0]["function"]["arguments"] if forced else choice["message"]["content"]
    assert len(json.loads(said)["text"]) >= 5


@pytest.mark.parametrize("begin", ["{", "<tool_call>"])
def test_with_tools_a_schema_shapes_the_answer_and_calls_stay_possible(
    http: httpx.Client, policy: ModelRunner, begin: str
) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    bias = {str(policy.tokenizer.convert_tokens_to_ids(begin)): 100}
    fields: dict[str, Json] = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 200, "logit_bias": bias}
    answer = chat(http, response_format=shape, **fields)["choices"][0]
    if begin == "{":
        assert json.loads(answer["message"]["content"]).keys() == {"ok"}
        assert answer["finish_reason"] == "stop"
    else:
        (call,) = answer["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")
    plain = chat(http, response_format=shape, tool_choice="none", **fields)["choices"][0]
    assert not plain["message"].get("tool_calls")


def test_text_is_no_format(http: httpx.Client) -> None:
    assert chat(http, response_format={"type": "text"})["choices"]
