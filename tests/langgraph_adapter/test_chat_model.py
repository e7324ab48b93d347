"""ChatOffbook against a scripted endpoint: what goes over the wire, and what comes back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import SecretStr

from offbook.base.types import CallOrigin
from offbook.testing import LlmReply, LlmRequest, calls_tool, says, scripted_llm
from offbook_langgraph import ChatOffbook
from offbook_langgraph.chat_model import THOUGHT

RAW = '{"order":"4821" , "note": "caf\\u00e9"}'  # spaces and escapes that json.dumps would not write
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def chat(url: str) -> ChatOffbook:
    return ChatOffbook(model="agent", base_url=url, api_key=SecretStr("key"))


def second_prompt(answer: AIMessage) -> list[HumanMessage | AIMessage | ToolMessage]:
    return [HumanMessage("hi"), answer, ToolMessage("found", tool_call_id=answer.tool_calls[0]["id"])]


def test_tool_arguments_are_sent_back_exactly_as_they_were_sampled() -> None:
    with scripted_llm([calls_tool("look_up", RAW), says("done")]) as server:
        answer = chat(server.url).bind_tools([TOOL]).invoke("hi")
        assert answer.tool_calls[0]["args"] == {"order": "4821", "note": "café"}
        chat(server.url).invoke(second_prompt(answer))
    assert server.requests[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"] == RAW


async def test_streamed_tool_arguments_are_sent_back_exactly_as_they_were_sampled() -> None:
    with scripted_llm([calls_tool("look_up", RAW), says("done")]) as server:
        model = chat(server.url)
        whole: Any = None
        async for chunk in model.bind_tools([TOOL]).astream("hi"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        answer = AIMessage(whole.content, tool_calls=whole.tool_calls, additional_kwargs=whole.additional_kwargs)
        await model.ainvoke(second_prompt(answer))
    assert server.requests[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"] == RAW


def thinks_then_calls(request: LlmRequest) -> LlmReply:
    return calls_tool("look_up", RAW, reasoning="look_up<1>()") if len(request.messages) == 1 else says("done")


def test_a_thought_is_no_part_of_the_text_and_is_sent_back() -> None:
    with scripted_llm(thinks_then_calls) as server:
        answer = chat(server.url).bind_tools([TOOL]).invoke("hi")
        assert answer.text == "" and answer.additional_kwargs[THOUGHT] == "look_up<1>()"
        chat(server.url).invoke(second_prompt(answer))
    sent = server.requests[1].body["messages"]
    assert sent[1]["reasoning"] == "look_up<1>()"
    assert "reasoning" not in sent[0] and "reasoning" not in sent[2]


async def test_a_streamed_thought_is_sent_back_whole() -> None:
    with scripted_llm(thinks_then_calls) as server:
        model = chat(server.url)
        whole: Any = None
        async for chunk in model.bind_tools([TOOL]).astream("hi"):
            whole = chunk if whole is None else whole + chunk
        assert whole.text == ""
        answer = AIMessage(whole.content, tool_calls=whole.tool_calls, additional_kwargs=whole.additional_kwargs)
        await model.ainvoke(second_prompt(answer))
    assert server.requests[1].body["messages"][1]["reasoning"] == "look_up<1>()"


def test_arguments_that_the_app_changed_are_sent_as_changed() -> None:
    with scripted_llm([calls_tool("look_up", RAW), says("done")]) as server:
        answer = chat(server.url).invoke("hi")
        answer.tool_calls[0]["args"] = {"order": "1"}
        chat(server.url).invoke(second_prompt(answer))
    sent = server.requests[1].body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"order": "1"}


def test_calls_carry_their_trajectory_and_origin() -> None:
    with scripted_llm([says("hello")]) as server:
        origin = CallOrigin(node="agent", step=2)
        chat(server.url).model_copy(update={"trajectory_id": "traj-1", "origin": origin}).invoke("hi")
    headers = server.requests[0].headers
    assert headers["x-offbook-trajectory"] == "traj-1"
    assert CallOrigin(**json.loads(headers["x-offbook-origin"])) == origin


def test_token_ids_and_logprobs_stay_out_of_the_message() -> None:
    with scripted_llm([says("hello")]) as server:
        answer = chat(server.url).invoke("hi")
    assert "logprobs" not in answer.response_metadata or answer.response_metadata["logprobs"] is None
    assert "token_ids" not in json.dumps(answer.model_dump(), default=repr)


def test_one_model_works_in_a_second_event_loop() -> None:
    with scripted_llm([says("hello")]) as server:
        model = chat(server.url)

        async def ask() -> str:
            return (await model.ainvoke("hi")).text

        assert [asyncio.run(ask()), asyncio.run(ask())] == ["hello", "hello"]


def test_a_failed_call_is_not_retried() -> None:
    assert chat("http://127.0.0.1:9/v1").root_client.max_retries == 0
