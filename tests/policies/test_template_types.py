"""How the chat template shows arguments of all types, what it refuses, and what it costs."""

import json
import re
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from offbook.tiny import path

TOKENIZER = AutoTokenizer.from_pretrained(path("tiny-mcp"))
SERVERS = Path(__file__).parent / "real_tools"


def tool(name="send", properties=None, required=(), **more):
    parameters = {"type": "object", "properties": properties or {}, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def render(tools):
    return TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}], tools=tools, tokenize=False)


def shown(properties, required=(), **more):
    return render([tool("send", properties, required, **more)]).split("<1>send<1>(")[1].split(")\n</tools>")[0]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, ""),
        ({"type": "string", "format": "date-time", "description": "a moment"}, ""),
        ({"type": "integer", "minimum": 1}, ": number"),
        ({"type": "number"}, ": number"),
        ({"type": "boolean", "default": False}, ": bool"),
        ({"type": "string", "enum": ["error", "New York"]}, ": error|New York"),
        ({"enum": [1, 2.5, True]}, ": 1|2.5|true"),
        ({"const": "fast"}, ": fast"),
        ({"type": "array", "items": {"type": "string"}}, ": []"),
        ({"type": "array"}, ": []"),
        ({"type": "array", "items": {"type": "integer"}}, ": number[]"),
        ({"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}, ": (a|b)[]"),
        ({"type": "object"}, ": {}"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ": {*?: number}"),
        ({"type": "object", "additionalProperties": True}, ": {}"),
        (
            {"type": "object", "properties": {"to": {"type": "string"}, "n": {"type": "integer"}}, "required": ["to"]},
            ": {to, n?: number}",
        ),
        (
            {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
            ": {a}[]",
        ),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ""),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, ": number"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ": number or string"),
        ({"type": ["integer", "null"]}, ": number"),
        ({"type": ["string", "boolean"]}, ": string or bool"),
        ({"allOf": [{"type": "boolean"}]}, ": bool"),
        ({}, ": any"),
        ({"title": "Anything"}, ": any"),
        (True, ": any"),
    ],
)
def test_each_type_is_shown_in_few_marks(schema, kind):
    assert shown({"x": schema}, ["x"]) == f"x{kind}"
    assert shown({"x": schema}) == f"x?{kind}"


def test_definitions_are_looked_up():
    point = {"type": "object", "properties": {"at": {"type": "number"}}, "required": ["at"]}
    assert shown({"p": {"$ref": "#/$defs/Point"}}, ["p"], **{"$defs": {"Point": point}}) == "p: {at: number}"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, "allOf"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
        ({"type": "array", "prefixItems": [{"type": "string"}]}, "prefixItems"),
        ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "properties beside anyOf"),
        ({"type": "date"}, 'its type is "date"'),
        ({"$ref": "#/$defs/Gone"}, "is not under \\$defs"),
        (False, "its schema is no object"),
        ({"type": "array", "items": {"not": {}, "allOf": [{}, {}]}}, "cannot read send.x.items"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(schema, reason):
    with pytest.raises(TemplateError, match=r"cannot read send\.x") as refused:
        render([tool("send", {"x": schema})])
    assert re.search(reason, str(refused.value))


@pytest.mark.parametrize("key", ["$ref", "anyOf", "allOf", "oneOf", "not", "if", "patternProperties"])
def test_a_tool_whose_arguments_are_more_than_properties_is_refused_by_name(key):
    with pytest.raises(TemplateError, match=rf"cannot read send: its arguments have {re.escape(key)}"):
        render([tool("send", {"a": {}}, ["a"], **{key: {}})])


def test_a_type_that_holds_itself_is_refused():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    with pytest.raises(TemplateError, match="more than six levels deep"):
        shown({"x": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": node}})
    loop = {"$ref": "#/$defs/Loop"}
    with pytest.raises(TemplateError, match="more than six levels deep"):
        shown({"x": loop}, **{"$defs": {"Loop": loop}})


def test_sixteen_tools_have_numbers_of_one_token_and_a_seventeenth_is_refused_by_name():
    text = render([tool(f"t{number}") for number in range(1, 17)])
    assert "<16>t16<16>()" in text
    assert all(len(TOKENIZER(f"<{number}>").input_ids) == 1 for number in range(1, 17))
    with pytest.raises(TemplateError, match="at most 16 tools; offered were 17, the 17th is t17"):
        render([tool(f"t{number}") for number in range(1, 18)])


@pytest.mark.parametrize(
    ("server", "count", "tokens"), [("time", 2, 68), ("filesystem", 8, 177), ("filesystem", 14, 314)]
)
def test_the_tools_of_real_servers_cost_few_tokens(server, count, tokens):
    tools = json.loads((SERVERS / f"{server}.json").read_text())["tools"][:count]
    text = render([{"type": "function", "function": each} for each in tools])
    assert len(TOKENIZER(text.split("<|im_end|>")[0] + "<|im_end|>").input_ids) == tokens


def test_short_descriptions_would_cost_nearly_as_much_as_the_list_of_tools():
    listed = json.loads((SERVERS.parents[1] / "mcp_adapter/listed/filesystem.json").read_text())["tools"]
    short = [" ".join(tool["description"].split()[:6]) for tool in listed]
    assert sum(len(TOKENIZER(f" {text}").input_ids) for text in short) == 229
