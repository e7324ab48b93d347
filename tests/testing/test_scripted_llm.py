"""The scripted endpoint, as clients of others see it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI

import offbook
from offbook.openai_dialect.chat_answer import chunks_of
from offbook.testing import LlmReply, LlmRequest, calls_tool, judges, says, scripted_llm
from offbook.testing.llm_endpoint import in_halves

HI: list[Any] = [{"role": "user", "content": "hi"}]


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="unused", max_retries=0, http_client=httpx.Client(trust_env=False))


def ask(url: str, **options: object) -> httpx.Response:
    return httpx.post(f"{url}/chat/completions", json={"model": "any", "messages": HI, **options}, trust_env=False)


def test_a_text_is_streamed_in_pieces_that_make_it_up_and_usage_comes_last_where_it_is_asked_for() -> None:
    with scripted_llm([says("On shelf 7.", usage=(4, 3))]) as endpoint, client(endpoint.url) as openai:
        stream = openai.chat.completions.create(
            model="any", messages=HI, stream=True, stream_options={"include_usage": True}
        )  # fmt: skip
        received = list(stream)
        without = [chunk.usage for chunk in openai.chat.completions.create(model="any", messages=HI, stream=True)]
    texts = [choice.delta.content for chunk in received for choice in chunk.choices if choice.delta.content]
    assert len(texts) == 2 and "".join(texts) == "On shelf 7."
    assert [choice.finish_reason for chunk in received for choice in chunk.choices][-1] == "stop"
    assert received[-1].choices == [] and received[-1].usage is not None and received[-1].usage.total_tokens == 7
    assert without == [None] * len(without)


def test_a_tool_call_has_the_same_name_id_and_arguments_whole_and_streamed() -> None:
    raw = '{"box":"4821" , "note": "caf\\u00e9"}'
    with scripted_llm([calls_tool("look_up", raw, call_id="call-1")]) as endpoint:
        [whole] = ask(endpoint.url).json()["choices"]
        lines = [line.removeprefix("data: ") for line in ask(endpoint.url, stream=True).text.split("\n\n") if line]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    assert whole["message"]["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "look_up", "arguments": raw}}
    ]
    assert lines[-1] == "[DONE]"
    parts = [
        call for line in lines[:-1] for call in json.loads(line)["choices"][0]["delta"].get("tool_calls") or []
    ]  # fmt: skip
    assert [(part.get("id"), part["function"].get("name")) for part in parts] == [("call-1", "look_up"), (None, None)]
    assert "".join(part["function"]["arguments"] for part in parts) == raw


def test_arguments_may_be_a_mapping() -> None:
    completion = calls_tool("look_up", {"box": 7}).completion
    assert completion is not None
    assert completion["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"box": 7}'


def test_every_completion_has_an_id_of_its_own() -> None:
    with scripted_llm([says("a")]) as endpoint:
        assert ask(endpoint.url).json()["id"] != ask(endpoint.url).json()["id"]


def test_all_choices_of_a_completion_are_streamed() -> None:
    message = {"role": "assistant", "content": "ab"}
    choices = [{"index": index, "message": message, "finish_reason": "stop"} for index in (0, 1)]
    made = list(chunks_of({"id": "1", "created": 0, "model": "m", "choices": choices}, in_halves))
    text = ["", ""]
    for chunk in made:
        for choice in chunk["choices"]:
            text[choice["index"]] += choice["delta"].get("content") or ""
    assert text == ["ab", "ab"]


def test_what_the_script_raises_is_a_500_that_names_it_and_is_raised_when_the_block_ends() -> None:
    def script(request: LlmRequest) -> LlmReply:
        raise LookupError("no such question")

    with (
        pytest.raises(LookupError, match="no such question"),
        scripted_llm(script) as endpoint,
        client(endpoint.url) as openai,
        pytest.raises(APIStatusError, match=r"the script raised LookupError: no such question"),
    ):
        openai.chat.completions.create(model="any", messages=HI)


def test_an_error_of_the_block_itself_is_not_replaced_by_the_scripts() -> None:
    def script(request: LlmRequest) -> LlmReply:
        raise LookupError("no such question")

    with pytest.raises(AssertionError, match="the test's own"), scripted_llm(script) as endpoint:
        assert ask(endpoint.url).status_code == 500
        raise AssertionError("the test's own")


def test_an_empty_script_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="script is empty"), scripted_llm([]):
        raise AssertionError("it was served")


def test_a_judges_reply_to_a_request_that_is_no_judges_prompt_fails_the_test() -> None:
    with (
        pytest.raises(ValueError, match=r"no prompt of RULER's.*hi"),
        scripted_llm(lambda request: judges(request, lambda attempt: 1.0)) as endpoint,
    ):
        assert ask(endpoint.url).status_code == 500


@pytest.mark.usefixtures("litellm")
async def test_a_scripted_judge_scores_each_attempt_by_its_own_conversation() -> None:
    group = offbook.TrajectoryGroup(
        offbook.Trajectory(messages_and_choices=[*HI, {"role": "assistant", "content": "x" * length}])
        for length in (1, 10, 5)
    )
    with scripted_llm(
        lambda request: judges(request, lambda attempt: len(str(attempt[0].messages[-1]["content"])) / 10, explanation="length")
    ) as endpoint:  # fmt: skip
        ruler = offbook.Ruler("openai/judge", api_base=endpoint.url, api_key="unused", cache=None)
        scored = await ruler(group)
    assert scored is not None
    assert [trajectory.reward for trajectory in scored] == [0.1, 1.0, 0.5]
    assert all("length" in trajectory.logs[-1] for trajectory in scored)
