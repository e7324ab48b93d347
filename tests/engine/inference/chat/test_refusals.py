"""Requests that are refused: by the name of the field, with what is wrong and what to do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from offbook.base.types import Json
from offbook.engine.inference.decoding.model import ModelRunner
from tests.engine.inference.engines import CONTEXT
from tests.engine.inference.served import SCHEMA, TOOLS, body, chat, events, refused, until_idle

LONG = "abcd" * 5000
IMAGE: Json = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LONG}"}}


def test_a_token_that_the_model_does_not_know_is_refused_alone(
    http: httpx.Client, policy: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(policy, "vocabulary", 40)
        error = refused(http)
    assert error["param"] == "messages" and "the model has tokens 0 to 39" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}], "response_format": {"type": "json_object"}}, "tools"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}, "tools": TOOLS, "tool_choice": "required"}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 2}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"] * 501}}, "structured_outputs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    http: httpx.Client, fields: dict[str, Json], param: str
) -> None:
    error = refused(http, **fields)
    assert error["param"] == param
    assert error["code"] == 400


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"type": "text", "text": "look"}, IMAGE], "messages.1.content.1"),
        ([{"type": "text", "text": 5, "more": LONG}], "messages.1.content.0"),
        ({"text": LONG}, "messages.1.content"),
    ],
)
def test_a_part_that_is_no_text_is_named_and_its_content_shortened(
    http: httpx.Client, messages: Json, named: str
) -> None:
    error = refused(http, messages=[{"role": "user", "content": "hi"}, {"role": "user", "content": messages}])
    assert error["param"] == "messages" and error["message"].startswith(named)
    assert len(error["message"]) < 400
    if "image_url" in str(messages):
        assert "type 'image_url'" in error["message"] and "data:image/png" in error["message"]


def test_other_refusals_are_short_too(http: httpx.Client) -> None:
    call: Json = {"id": "1", "type": "function", "function": LONG}
    bodies: tuple[dict[str, Any], ...] = (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": LONG},
        {"top_p": LONG},
        {"tools": [{"type": "function", "function": {"text": LONG}}], "tool_choice": "required"},
    )
    for fields in bodies:
        assert len(refused(http, **fields)["message"]) < 400


CIRCLE: Json = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
DEEP: Json = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], "$defs": CIRCLE["$defs"]}


def tool(name: str, parameters: Json) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema_of(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, CIRCLE, {"type": "string", "enum": []}, {"enum": []}, False])
def test_a_schema_that_nothing_follows_is_refused_by_its_place(http: httpx.Client, schema: Json) -> None:
    assert refused(http, response_format=schema_of(schema))["param"] == "response_format"
    if schema is False:
        return  # a tool without parameters
    tools = [tool("fine", SCHEMA), tool("bad", schema)]
    bad: Json = {"type": "function", "function": {"name": "bad"}}
    bodies: tuple[dict[str, Any], ...] = (
        {"tool_choice": "required"},
        {"tool_choice": bad},
        {"response_format": schema_of(SCHEMA)},
        {"response_format": {"type": "json_object"}, "tool_choice": "auto"},
    )
    for fields in bodies:
        error = refused(http, tools=tools, **fields)
        assert error["param"] == "tools[1]" and error["message"].startswith("tools[1]")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_schema_with_a_part_that_nothing_follows_fails_its_own_call_only(
    http: httpx.Client, policy: ModelRunner, streamed: bool
) -> None:
    bias = {str(token): -100 for token in (9, 10, 13, 32, 197, 198, 201, 220)}
    fields: dict[str, Json] = {"response_format": schema_of(DEEP), "max_tokens": 200, "logit_bias": bias}
    with http.stream("POST", "/v1/chat/completions", json=body(stream=True, ignore_eos=True, max_tokens=400)) as other:
        lines = (line for line in other.iter_lines() if line)
        next(lines)
        error = events(http, **fields)[-1]["error"] if streamed else refused(http, **fields)
        assert (error["param"], error["code"], error["type"]) == ("response_format", 400, "BadRequestError")
        assert "no JSON satisfies the schema" in error["message"] and '"a":' in error["message"]
        assert json.loads(list(lines)[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    until_idle(http)
    assert chat(http)["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 1000 * CONTEXT}]}, "messages"),
    ],
)
def test_what_exceeds_the_context_has_openais_code(http: httpx.Client, fields: dict[str, Json], param: str) -> None:
    error = refused(http, **fields)
    assert (error["param"], error["code"], error["type"]) == (param, "context_length_exceeded", "BadRequestError")


def test_an_overlong_context_says_what_to_lower(http: httpx.Client) -> None:
    message = refused(http, max_tokens=CONTEXT)["message"]
    assert str(CONTEXT) in message
    assert "--max-model-len" in message
    assert "lower max_tokens to" in message


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b"\xff"])
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, content: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=content)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


def test_fields_without_effect_and_nulls_are_accepted(http: httpx.Client) -> None:
    assert chat(http, user="me", metadata={"a": "b"}, store=False, stop=None, tools=None, bad_words=None)["choices"]


def test_unknown_names_and_paths_have_openais_error_shape(http: httpx.Client) -> None:
    assert "base" in refused(http, 404, model="other")["message"]
    assert http.get("/nothing").json()["error"]["code"] == 404


@pytest.mark.parametrize("where", ["pattern", "patternProperties"])
def test_a_pattern_whose_nested_repeats_would_make_masks_slow_is_refused(http: httpx.Client, where: str) -> None:
    slow = "^((a{1,50}){1,50}){1,50}$"
    part: Json = {"type": "string", "pattern": slow}
    schema: Json = {"type": "object", "patternProperties": {slow: {}}} if where == "patternProperties" else part
    error = refused(http, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert error["param"] == "response_format" and "125,0" in error["message"] and "50,000" in error["message"]


def test_a_pattern_that_python_cannot_parse_has_its_bounds_multiplied(http: httpx.Client) -> None:
    slow: Json = {"type": "string", "pattern": r"^(?<word>(\p{L}{1,50}){1,50}){1,50}$"}
    error = refused(http, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": slow}})
    assert error["param"] == "response_format" and "125,000" in error["message"]
