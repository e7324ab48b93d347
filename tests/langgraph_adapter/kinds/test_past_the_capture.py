"""What leaves past the capture: another LLM's request is named with its line; what is no LLM's may leave."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_openai import OpenAIEmbeddings
from langgraph.graph import START, MessagesState, StateGraph
from openai import AsyncOpenAI, OpenAI

from offbook.base.errors import LeakError
from offbook.testing import says, scripted_llm
from offbook_langgraph import observe

from .apps import add, asked, last, own_model
from .policy import Policy


def graph_of(node: Any) -> Any:
    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()


def test_a_raw_openai_client_in_a_node_is_named(policy: Policy) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        client = OpenAI(max_retries=0)
        client.chat.completions.create(model="gpt-4.1-mini", messages=[{"role": "user", "content": "hi"}])
        return {}

    named = r"127\.0\.0\.1:9/v1/chat/completions.*test_past_the_capture\.py:\d+ in node"
    with pytest.raises(LeakError, match=named), policy.rollout():
        graph_of(node).invoke(asked("hi"))


async def test_a_raw_async_client_that_streams_is_named(policy: Policy) -> None:
    async def node(state: MessagesState) -> dict[str, Any]:
        client = AsyncOpenAI(max_retries=0)
        await client.chat.completions.create(
            model="gpt-4.1-mini", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        return {}

    with pytest.raises(LeakError, match=r"test_past_the_capture\.py:\d+ in node"):
        async with policy.rollout():
            await graph_of(node).ainvoke(asked("hi"))


def test_a_raw_client_may_be_warned_of(policy: Policy) -> None:
    with scripted_llm([says("mine")]) as own:

        def node(state: MessagesState) -> dict[str, Any]:
            client = OpenAI(base_url=own.url)
            answer = client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
            return {"messages": [("ai", answer.choices[0].message.content)]}

        with policy.rollout(on_leak="warn") as made:
            assert last(graph_of(node).invoke(asked("hi"))) == "mine"
    assert "test_past_the_capture.py" in made.trajectory.logs[0]
    made.calls(0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"model": "text-embedding-3-small", "input": "what is the size of box 7?"}),
        ("embeddings", {"model": "text-embedding-3-small", "input": ["one", "two"]}),
        ("moderations", {"model": "omni-moderation-latest", "input": "hello"}),
        ("audio/speech", {"model": "gpt-4o-mini-tts", "input": "hello", "voice": "alloy"}),
        ("images/generations", {"model": "gpt-image-1", "prompt": "a city"}),
    ],
)
def test_a_request_to_a_model_that_is_no_llm_is_no_leak(policy: Policy, path: str, body: Any) -> None:
    with scripted_llm([says("")]) as own, policy.rollout() as made:
        assert httpx.post(f"{own.url}/{path}", json=body).status_code == 200
    made.calls(0)


def test_an_app_that_looks_things_up_by_embeddings(policy: Policy) -> None:
    with scripted_llm([says("")]) as own:

        def node(state: MessagesState) -> dict[str, Any]:
            embeddings = OpenAIEmbeddings(base_url=own.url, check_embedding_ctx_length=False, max_retries=0)
            with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):  # the fake gives no vectors
                embeddings.embed_query("box 7")
            return {"messages": [own_model().invoke(state["messages"])]}

        with policy.rollout() as made:
            assert last(graph_of(node).invoke(asked("hi"))) == "heard: hi"
    made.calls(1)


def test_a_call_with_a_tool_that_the_provider_runs_is_observed_all_the_same() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("a city")]))
    with observe() as seen:
        model.bind(tools=[{"google_search": {}}, add]).invoke("hi")
    assert seen.metrics["calls"] == 1
