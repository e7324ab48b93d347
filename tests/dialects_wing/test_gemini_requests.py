"""Bodies of Gemini's `generateContent` as chat completions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic.alias_generators import to_camel, to_snake

from offbook.server.calls.sampled_calls import TrajectoryCalls
from offbook.server.errors import ApiError
from offbook_dialects.gemini.fields import GenerateContent
from offbook_dialects.gemini.request import chat_body

SIZES = {"type": "OBJECT", "properties": {"box": {"type": "STRING", "nullable": True}}, "required": ["box"]}
ODD = (None, True, -1, 1.5, "", "x", "OBJECT", [], [None], [[]], {}, {"type": 1}, {"parts": {}}, {"text": None})
WHOLE: dict[str, Any] = {
    "contents": [
        {"role": "user", "parts": [{"text": "how large?"}, {"inlineData": {"mimeType": "image/png", "data": "aGk="}}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"functionCall": {"id": "one", "name": "f", "args": {"n": [1]}}, "thoughtSignature": "aGk="},
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"id": "one", "name": "f", "response": {"result": 7}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "tools": [{"functionDeclarations": [{"name": "f", "description": "", "parameters": SIZES}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {
        "topK": 64,
        "stopSequences": ["."],
        "responseMimeType": "application/json",
        "responseSchema": {"anyOf": [SIZES, {"type": "ARRAY", "items": SIZES, "minItems": "1"}]},
        "thinkingConfig": {"thinkingBudget": 0, "includeThoughts": False},
    },
}
PIXEL = "iVBORw0KGgo_-A=="  # in the alphabet of URLs, as Google's SDK writes it


def turn(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def call(name: str, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args}}


def result(name: str, **response: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response}}


def chat(*contents: dict[str, Any], said: TrajectoryCalls | None = None, **fields: Any) -> dict[str, Any]:
    body = {"contents": list(contents) or [turn("user", {"text": "hi"})]} | fields
    request = GenerateContent.model_validate(body)
    return chat_body(request, said or TrajectoryCalls())


def messages(*contents: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(*contents, **fields)["messages"]


def renamed(value: Any, name: Any) -> Any:
    """A request with the names of its fields changed. Names in arguments and schemas are the user's."""
    if isinstance(value, list):
        return [renamed(item, name) for item in value]
    if not isinstance(value, dict):
        return value
    own = ("args", "response", "parametersJsonSchema")
    return {name(key): item if key in own else renamed(item, name) for key, item in value.items()}


def test_fields_may_be_written_in_either_case() -> None:
    body = {
        "contents": [turn("model", call("box_size", boxId="a b")), turn("user", result("box_size", result="7"))],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "box_size", "parametersJsonSchema": {"type": "object"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["box_size"]}},
        "generationConfig": {"topK": 64, "topP": 0.5, "maxOutputTokens": 9, "stopSequences": ["."]},
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    }
    snake, camel = renamed(body, to_snake), renamed(body, to_camel)
    assert snake != camel == body
    assert chat(**camel) == chat(**snake)
    assert chat(**body)["top_k"] == 64 and chat(**body)["tools"][0]["function"]["parameters"] == {"type": "object"}


def test_pieces_of_a_stream_that_come_back_as_turns_are_one_message() -> None:
    pieces = [turn("model", {"text": text}) for text in ("the ", "size", "")]
    (message,) = messages(turn("model", {"text": "hm", "thought": True}), *pieces, turn("model", call("f"), call("g")))
    assert (message["reasoning"], message["content"]) == ("hm", "the size")
    assert [item["function"]["name"] for item in message["tool_calls"]] == ["f", "g"]


def test_results_belong_to_open_calls_of_their_name_in_order() -> None:
    calls = turn("model", call("f", n=1), call("g"), call("f", n=2))
    results = turn("user", result("f", result="first"), result("g", output=[1]), result("f", error="none"))
    assistant, *tools = messages(calls, results)
    ids = [item["id"] for item in assistant["tool_calls"]]
    assert len(set(ids)) == 3
    assert [item["tool_call_id"] for item in tools] == ids[:1] + ids[1:2] + ids[2:]
    assert [item["content"] for item in tools] == ["first", "[1]", '{"error": "none"}']


def test_a_result_names_its_call_by_id_if_it_can() -> None:
    calls = [{"functionCall": {"id": name, "name": "f", "args": {}}} for name in ("one", "two")]
    named = {"functionResponse": {"id": "two", "name": "f", "response": {"result": "2"}}}
    _, second, first = messages(turn("model", *calls), turn("user", named, result("f", result="1")))
    assert (second["tool_call_id"], first["tool_call_id"]) == ("two", "one")


def test_equal_calls_without_ids_are_told_apart() -> None:
    """LangChain's client drops the ids of calls, and the record knows equal ones by their arguments alone."""
    said = TrajectoryCalls()
    said.add(
        {
            "role": "assistant",
            "tool_calls": [{"id": name, "function": {"name": "f", "arguments": '{"n":1}'}} for name in ("one", "two")],
        }
    )
    contents = (
        turn("model", call("f", n=1), call("f", n=1)),
        turn("user", result("f", result="1"), result("f", result="2")),
    )
    assistant, *tools = chat(*contents, said=said)["messages"]
    ids = [item["id"] for item in assistant["tool_calls"]]
    assert len(set(ids)) == 2 and [item["tool_call_id"] for item in tools] == ids
    assert [item["function"]["arguments"] for item in assistant["tool_calls"]] == 2 * ['{"n":1}']


def test_arguments_that_are_no_json_object_come_back_as_they_were_sampled() -> None:
    (message,) = messages(turn("model", call("f", __raw_arguments='{"n": 1')))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"n": 1'


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a value, with each of its keys."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from places(item)


def test_a_body_with_anything_in_any_place_is_translated_or_refused() -> None:
    chance = random.Random(1)
    refused = 0
    for _ in range(1_000):
        body = deepcopy(WHOLE)
        for _ in range(chance.randint(1, 3)):
            container, key = chance.choice(list(places(body)))
            container[key] = deepcopy(chance.choice(ODD))
        try:
            chat(**body)
        except (ApiError, ValidationError):
            refused += 1
    assert 200 < refused < 1_000


def test_images_follow_all_results_and_are_in_standard_base64() -> None:
    blob = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    shown = {"functionResponse": {"name": "f", "response": {}, "parts": [blob]}}
    _, one, two, said = messages(
        turn("model", call("f"), call("f")), turn("user", shown, result("f", result="2"), {"text": "look"})
    )
    assert [one["role"], two["role"], said["role"]] == ["tool", "tool", "user"]
    url = f"data:image/png;base64,{PIXEL.replace('-', '+').replace('_', '/')}"
    assert said["content"] == [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]


def test_a_schema_of_openapi_becomes_a_json_schema() -> None:
    declared = {"name": "f", "description": "", "parameters": SIZES}
    function = chat(tools=[{"functionDeclarations": [declared]}])["tools"][0]["function"]
    parameters = {"type": "object", "properties": {"box": {"type": ["string", "null"]}}, "required": ["box"]}
    assert function == {"name": "f", "description": "", "parameters": parameters}
    config = {"responseMimeType": "application/json", "responseSchema": SIZES}
    assert chat(generationConfig=config)["response_format"]["json_schema"]["schema"] == parameters


@pytest.mark.parametrize(
    ("mode", "names", "expected"),
    [
        ("AUTO", None, None),
        ("VALIDATED", None, None),
        ("ANY", None, "required"),
        ("any", ["f"], "required"),
        ("NONE", None, "none"),
        ("NONE", ["f"], "none"),
        ("VALIDATED", ["f"], "auto"),
    ],
)
def test_modes_of_function_calling(mode: str, names: list[str] | None, expected: str | None) -> None:
    config = {"functionCallingConfig": {"mode": mode, "allowedFunctionNames": names}}
    choice = chat(tools=[{"functionDeclarations": [{"name": "f"}]}], toolConfig=config).get("tool_choice")
    mode_of_choice = choice["allowed_tools"]["mode"] if isinstance(choice, dict) else choice
    assert mode_of_choice == expected


def test_a_budget_of_no_thoughts_turns_them_off_and_others_have_no_effect() -> None:
    assert chat(generationConfig={"thinkingConfig": {"thinkingBudget": 0}})["enable_thinking"] is False
    plain = chat()
    assert chat(generationConfig={"thinkingConfig": {"thinkingBudget": 8192, "includeThoughts": True}}) == plain
    assert chat(generationConfig={"thinkingConfig": {"thinkingLevel": "LOW"}}) == plain | {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"googleSearch": {}}]}, "googleSearch"),
        ({"tools": [{"google_search": {}}]}, "google_search"),
        ({"tools": [{"codeExecution": {}}]}, "codeExecution"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"cached_content": "cachedContents/1"}, "cached_content"),
        ({"generationConfig": {"speechConfig": {}}}, "speechConfig"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType"),
        ({"contents": [turn("user", {"fileData": {"fileUri": "gs://x"}})]}, "fileData"),
        ({"contents": [turn("user", {"executableCode": {}})]}, "executableCode"),
        ({"contents": [turn("user", {"inlineData": {"mimeType": "audio/mp3", "data": ""}})]}, "audio/mp3"),
        ({"contents": [turn("user", result("f", result="7"))]}, "'f'"),
        ({"contents": [turn("user", call("f"))]}, "functionCall"),
        ({"contents": [turn("model", result("f"))]}, "a turn of the model"),
        (
            {"systemInstruction": {"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}},
            "systemInstruction",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as refused:
        chat(**{"contents": [turn("user", {"text": "hi"})], **fields})
    assert refused.value.status == 400 and refused.value.param
