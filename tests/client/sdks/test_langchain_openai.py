"""LangChain's `ChatOpenAI` on both of OpenAI's APIs, at a URL: without the adapter."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from offbook.base.types import new_id
from offbook.testing import ScriptedServer

from .rollouts import recorded, shown


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("responses", "kept"), [(False, False), (True, False), (True, True)])
async def test_a_chat_model_calls_tools(served: ScriptedServer, streamed: bool, responses: bool, kept: bool) -> None:
    """`kept`: the client sends the id of the response before instead of the messages."""
    rollout = new_id("traj")
    chat = ChatOpenAI(
        model="default",
        base_url=f"{served.url}/t/{rollout}/v1",
        api_key=SecretStr("unused"),
        use_responses_api=responses,
        use_previous_response_id=kept,
        max_retries=0,
    ).bind_tools([add])
    messages: list[Any] = [HumanMessage("add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)")]
    for _ in range(3):
        if streamed:
            pieces = [piece async for piece in chat.astream(messages)]
            answer: Any = pieces[0]
            for piece in pieces[1:]:
                answer += piece
        else:
            answer = await chat.ainvoke(messages)
        messages.append(answer)
        messages += [ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert messages[-1].text == "the tools said 3, 7, 11"
    api = "Responses" if responses else "chat completions"
    shown(served, "langchain-openai", api, recorded(served, rollout, 3))
