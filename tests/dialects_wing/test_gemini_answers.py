"""Chat completions as Gemini's answers, each object validated with the types of Google's SDK."""

from __future__ import annotations

import json
from typing import Any

from google.genai import types

from offbook.server.errors import ApiError
from offbook_dialects.gemini.answer import GeminiAnswer, read_signature

CALLS = [
    {"id": "one", "function": {"name": "f", "arguments": '{"n":  1}'}},
    {"id": "two", "function": {"name": "g", "arguments": "{"}},
]
MESSAGE = {"role": "assistant", "reasoning": "hm", "content": "the size", "tool_calls": CALLS}
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def known(body: Any) -> types.GenerateContentResponse:
    """A body that has no field which Google's types do not know."""
    return types.GenerateContentResponse.model_validate(body)


def parts(response: types.GenerateContentResponse, index: int = 0) -> list[types.Part]:
    """The parts of a candidate of an answer, if it has one."""
    candidates = [item for item in response.candidates or () if item.index == index]
    return [part for item in candidates if item.content is not None for part in item.content.parts or ()]


def streamed() -> list[types.GenerateContentResponse]:
    rendering = GeminiAnswer("m")
    sent = rendering.start("call-a")
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning": "h"},
        {"reasoning": "m"},
        {"content": "the "},
        {"content": "size"},
    ):
        for index in (0, 1):
            sent += rendering.feed({"choices": [{"index": index, "delta": delta}]})
    for index, call in enumerate(CALLS):
        head = {"index": index, "id": call["id"], "function": {"name": call["function"]["name"], "arguments": ""}}
        sent += rendering.feed({"choices": [{"index": 0, "delta": {"tool_calls": [head]}}]})
        for character in call["function"]["arguments"]:
            piece = {"index": index, "function": {"arguments": character}}
            sent += rendering.feed({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}}]})
    ends = [
        {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
        {"index": 1, "delta": {}, "finish_reason": "length"},
    ]
    sent += rendering.feed({"choices": ends})
    sent += rendering.feed({"choices": [], "usage": USAGE})
    raw = sent + rendering.end()
    return [known(json.loads(event.removeprefix(b"data: "))) for event in raw.split(b"\n\n") if event]


def test_a_whole_answer_has_thoughts_text_and_calls() -> None:
    choices = [{"index": 0, "message": MESSAGE, "finish_reason": "tool_calls"}]
    answer = known(GeminiAnswer("m").whole({"choices": choices, "usage": USAGE}, "call-a"))
    thought, text, one, two = parts(answer)
    assert (thought.text, thought.thought, text.text) == ("hm", True, "the size")
    assert one.function_call is not None and (one.function_call.id, one.function_call.args) == ("one", {"n": 1})
    assert two.function_call is not None and two.function_call.args == {"__raw_arguments": "{"}
    assert read_signature(two.model_dump(mode="json")["thought_signature"]) == "two"
    assert (answer.response_id, answer.model_version) == ("call-a", "m")
    assert answer.usage_metadata is not None and answer.usage_metadata.total_token_count == 12


def test_a_stream_adds_up_to_the_whole_answer() -> None:
    answers = streamed()
    for index in (0, 1):
        said = [part for answer in answers for part in parts(answer, index)]
        assert "".join(part.text or "" for part in said if part.thought) == "hm"
        assert "".join(part.text or "" for part in said if not part.thought) == "the size"
    calls = [part.function_call for answer in answers for part in parts(answer) if part.function_call is not None]
    assert [(call.id, call.name, call.args) for call in calls] == [
        ("one", "f", {"n": 1}),
        ("two", "g", {"__raw_arguments": "{"}),
    ]
    last = answers[-1]
    assert [item.finish_reason for item in last.candidates or ()] == [
        types.FinishReason.STOP,
        types.FinishReason.MAX_TOKENS,
    ]
    assert last.usage_metadata is not None and last.usage_metadata.prompt_token_count == 5


def test_a_stream_that_fails_ends_with_the_error() -> None:
    rendering = GeminiAnswer("m")
    sent = rendering.feed({"choices": [{"index": 0, "delta": {"content": "the "}}]})
    raw = sent + rendering.error(ApiError(502, "out of order"))
    bodies = [json.loads(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n") if event]
    assert bodies[-1] == {"error": {"code": 502, "message": "out of order", "status": "INTERNAL"}}
