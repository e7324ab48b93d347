"""Apps that stream: from the graph, from inside a node, as events. What arrives in pieces is what was sampled."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph

from offbook.base.types import CallStatus

from .apps import City, add, asked, double, last, own_model
from .policy import Policy, one_branch, origins, until

ORDER = "add(a=1, b=2) and double(x=3)"
SAID = "the tools said 3, 6"


def whole(chunks: list[Any]) -> AIMessage:
    """Chunks of one message, added up."""
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    return total


def streamed_graph(model: Any) -> Any:
    """A node that consumes the model's own stream."""

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [whole(list(model.stream(state["messages"])))]}

    async def athink(state: MessagesState) -> dict[str, Any]:
        return {"messages": [whole([chunk async for chunk in model.astream(state["messages"])])]}

    return StateGraph(MessagesState).add_node("think", RunnableLambda(think, athink)).add_edge(START, "think").compile()


def test_an_agent_whose_messages_are_streamed(policy: Policy) -> None:
    app: Any = create_agent(own_model(), [add, double])
    with policy.rollout() as made:
        chunks = [
            chunk for chunk, _ in app.stream(asked(ORDER), stream_mode="messages") if chunk.type == "AIMessageChunk"
        ]
    texts = [chunk.text for chunk in chunks if chunk.text]
    assert "".join(texts) == SAID
    assert len(texts) == 5  # word by word
    assert [call["args"] for call in whole(chunks).tool_calls] == [{"a": 1, "b": 2}, {"x": 3}]
    assert one_branch(made.calls(2))
    assert all(request["stream"] for request in made.requests)


async def test_an_agent_whose_messages_are_streamed_async_with_subgraphs(policy: Policy) -> None:
    inner = create_agent(own_model(), [add, double], name="inner")
    app: Any = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile()
    texts: list[str] = []
    async with policy.rollout() as made:
        async for namespace, (chunk, facts) in app.astream(asked(ORDER), stream_mode="messages", subgraphs=True):
            if isinstance(chunk, AIMessageChunk):
                assert namespace[0].startswith("inner:")
                assert facts["langgraph_node"] == "model"
                texts.append(chunk.text)
    assert "".join(texts) == SAID
    assert one_branch(made.calls(2))


def test_an_agent_streamed_in_several_modes_at_once(policy: Policy) -> None:
    app = create_agent(own_model(), [add, double])
    seen: dict[str, list[Any]] = {"updates": [], "values": [], "messages": []}
    with policy.rollout() as made:
        for mode, item in app.stream(asked(ORDER), stream_mode=["updates", "values", "messages"]):
            seen[str(mode)].append(item)
    assert [list(item) for item in seen["updates"]] == [["model"], ["tools"], ["tools"], ["model"]]
    assert last(seen["values"][-1]) == SAID
    assert "".join(chunk.text for chunk, _ in seen["messages"] if chunk.type == "AIMessageChunk") == SAID
    made.calls(2)


def test_a_model_streamed_inside_a_node(policy: Policy) -> None:
    with policy.rollout() as made:
        assert last(streamed_graph(own_model()).invoke(asked("one two three"))) == "heard: one two three"
    assert origins(made.calls(1))[0].node == "think"
    assert made.requests[0]["stream"] is True


async def test_a_model_streamed_async_inside_a_node(policy: Policy) -> None:
    model = own_model().bind_tools([add, double])
    async with policy.rollout() as made:
        state = await streamed_graph(model).ainvoke(asked(ORDER))
    assert [(call["name"], call["args"]) for call in state["messages"][-1].tool_calls] == [
        ("add", {"a": 1, "b": 2}),
        ("double", {"x": 3}),
    ]
    assert origins(made.calls(1))[0].node == "think"


def test_a_model_that_always_streams(policy: Policy) -> None:
    app = create_agent(own_model(streaming=True), [add, double])
    with policy.rollout() as made:
        assert last(app.invoke(asked(ORDER))) == SAID
    assert one_branch(made.calls(2))


def test_a_model_that_may_not_stream(policy: Policy) -> None:
    app = create_agent(own_model(disable_streaming=True), [add, double])
    with policy.rollout() as made:
        streamed: Any = app.stream(asked(ORDER), stream_mode="messages")
        chunks = [chunk for chunk, _ in streamed if chunk.type != "tool"]
    made.calls(2)
    assert not any(request.get("stream") for request in made.requests)
    assert [(chunk.type, chunk.text) for chunk in chunks] == [("ai", ""), ("ai", SAID)]  # whole messages


async def test_events_v2_of_an_agent(policy: Policy) -> None:
    app = create_agent(own_model(), [add, double])
    async with policy.rollout() as made:
        events: list[Any] = [event async for event in app.astream_events(asked(ORDER), version="v2")]
    made.calls(2)
    kinds = [event["event"] for event in events]
    assert (kinds.count("on_chat_model_start"), kinds.count("on_chat_model_end"), kinds.count("on_tool_end")) == (
        2,
        2,
        2,
    )
    pieces = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(pieces) == SAID
    assert last(events[-1]["data"]["output"]) == SAID


async def test_events_v2_of_a_chain(policy: Policy) -> None:
    chain = (
        ChatPromptTemplate.from_messages([("user", "{it}")])
        | own_model().with_config(tags=["mine"])
        | StrOutputParser()
    )
    async with policy.rollout() as made:
        found: list[Any] = [
            e async for e in chain.astream_events({"it": "one two"}, version="v2", include_tags=["mine"])
        ]
    assert "mine" in origins(made.calls(1))[0].tags
    assert (
        "".join(each["data"]["chunk"].text for each in found if each["event"] == "on_chat_model_stream")
        == "heard: one two"
    )


def test_events_v3_of_a_graph(policy: Policy) -> None:
    app = create_agent(own_model(), [add, double])
    with policy.rollout() as made:
        run = app.stream_events(asked(ORDER), version="v3")
        texts = ["".join(message.text) for message in run.messages]
        assert last(run.output) == SAID
    assert texts == ["", SAID]
    assert one_branch(made.calls(2))


async def test_events_v3_of_a_graph_async(policy: Policy) -> None:
    app = create_agent(own_model(), [add, double])
    async with policy.rollout() as made:
        run = await app.astream_events(asked(ORDER), version="v3")
        texts = ["".join([piece async for piece in message.text]) async for message in run.messages]
        assert last(await run.output()) == SAID
    assert texts == ["", SAID]
    assert one_branch(made.calls(2))


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_events_v3_of_a_model_in_a_node(policy: Policy) -> None:
    def think(state: MessagesState) -> dict[str, Any]:
        stream: Any = own_model().bind_tools([add]).stream_events(state["messages"], version="v3")
        assert "".join(stream.text) == "heard: one two"
        return {"messages": [stream.output]}

    app = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think").compile()
    with policy.rollout() as made:
        assert last(app.invoke(asked("one two"))) == "heard: one two"
    assert origins(made.calls(1))[0].node == "think"
    assert made.requests[0]["tools"]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
async def test_events_v3_of_an_async_model_in_a_node(policy: Policy) -> None:
    async def think(state: MessagesState) -> dict[str, Any]:
        stream = await own_model().bind_tools([add]).astream_events(state["messages"], version="v3")
        return {"messages": [await stream.output]}

    app = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think").compile()
    async with policy.rollout() as made:
        state = await app.ainvoke(asked("add(a=1, b=2)"))
    assert [call["args"] for call in state["messages"][-1].tool_calls] == [{"a": 1, "b": 2}]
    assert origins(made.calls(1))[0].node == "think"


def test_pieces_that_a_node_passes_on_itself(policy: Policy) -> None:
    def think(state: MessagesState) -> dict[str, Any]:
        write = get_stream_writer()
        for chunk in own_model().stream(state["messages"]):
            write(chunk.text)
        return {}

    app: Any = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think").compile()
    with policy.rollout() as made:
        assert "".join(app.stream(asked("one two"), stream_mode="custom")) == "heard: one two"
    made.calls(1)


async def test_a_parser_that_grows_with_the_stream(policy: Policy) -> None:
    chain = own_model().bind(response_format={"type": "json_object"}) | JsonOutputParser(pydantic_object=City)
    async with policy.rollout() as made:
        found = [item async for item in chain.astream("a city")]
    assert found[-1] == {"city": "teal", "size": 7}
    assert len(found) > 1
    assert made.calls(1)[0].constrained == "response_format"
    assert made.requests[0]["response_format"] == {"type": "json_object"}


def test_a_stream_that_is_given_up(policy: Policy) -> None:
    policy.server.sampler.piece_seconds = 0.05
    with policy.rollout() as made:
        stream: Any = own_model().stream("one two three four five six seven eight nine ten " * 5)
        next(stream)
        stream.close()
    [call] = until(lambda: policy.server.calls(made.trajectory.id), "the call is recorded")
    assert call.status == CallStatus.CANCELLED
    assert call.outputs[0].token_ids or not call.outputs[0].message["content"]


def test_token_usage_and_finish_reason_of_a_stream(policy: Policy) -> None:
    with policy.rollout() as made:
        total = whole(list(own_model(stream_usage=True).stream("one two")))
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == len(made.calls(1)[0].outputs[0].token_ids)
    assert total.response_metadata["finish_reason"] == "stop"
