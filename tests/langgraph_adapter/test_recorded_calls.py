"""Calls whose output was thrown away are marked, and `train_on=` weighs calls by where they were made."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, interrupt

from offbook import TrainableModel, Trajectory
from offbook.base.errors import ConfigError
from offbook.testing import ScriptedServer
from offbook_langgraph import capture

OWN = {"model": "own", "api_key": "unused", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0}


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**(OWN | options))


def asked_and_unused(gateway: ScriptedServer, trajectory: Trajectory) -> list[tuple[str, bool]]:
    """What each call was asked last, and whether its output was thrown away."""
    return [(call.messages[-1]["content"], call.id in trajectory.unused) for call in gateway.calls(trajectory.id)]


def one_node(node: Any, **options: Any) -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(MessagesState)
    graph.add_node("agent", node, **options)
    graph.add_edge(START, "agent")
    return graph


def test_nothing_is_unused_in_a_plain_run(stand_in: TrainableModel, obedient: ScriptedServer) -> None:
    graph = one_node(lambda state: {"messages": [model().invoke(state["messages"])]}).compile()
    with capture(stand_in) as trajectory:
        graph.invoke({"messages": [("user", "hi")]})
    assert asked_and_unused(obedient, trajectory) == [("hi", False)]


@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_node_that_is_retried_leaves_its_first_call_unused(
    way: str, stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    attempts: list[int] = []

    def node(state: Any) -> Any:
        attempts.append(1)
        answer = model(streaming=way == "stream").invoke(f"attempt {len(attempts)}", {"callbacks": []})
        if len(attempts) == 1:
            raise ConnectionError("the tool's network")
        return {"messages": [answer]}

    graph = one_node(node, retry_policy=RetryPolicy(initial_interval=0.01, max_attempts=2)).compile()
    with capture(stand_in) as trajectory:
        graph.invoke({"messages": [("user", "hi")]}) if way == "invoke" else list(graph.stream({"messages": []}))
    assert asked_and_unused(obedient, trajectory) == [("attempt 1", True), ("attempt 2", False)]


async def test_a_node_that_runs_again_after_an_interrupt_leaves_its_first_call_unused(
    stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    async def before(state: Any) -> Any:
        return {"messages": [await model().ainvoke("before")]}

    async def node(state: Any) -> Any:
        answer = await model().ainvoke("approve?")
        interrupt("approve?")
        return {"messages": [answer]}

    graph = StateGraph(MessagesState)
    graph.add_node("before", before)
    graph.add_node("agent", node)
    graph.add_edge(START, "before").add_edge("before", "agent")
    app = graph.compile(checkpointer=InMemorySaver())
    async with capture(stand_in) as trajectory:
        config: Any = {"configurable": {"thread_id": trajectory.id}}
        await app.ainvoke({"messages": []}, config)
        await app.ainvoke(Command(resume="yes"), config)
    assert asked_and_unused(obedient, trajectory) == [("before", False), ("approve?", True), ("approve?", False)]


def test_a_chain_under_with_retry_and_with_fallbacks(stand_in: TrainableModel, obedient: ScriptedServer) -> None:
    seen: list[str] = []

    def picky(text: str) -> str:
        seen.append(text)
        if len(seen) == 1:
            raise ValueError("not this")
        return text

    chain = (model() | StrOutputParser() | RunnableLambda(picky)).with_retry(wait_exponential_jitter=False)
    with capture(stand_in) as trajectory:
        chain.invoke("hi")
    assert asked_and_unused(obedient, trajectory) == [("hi", True), ("hi", False)]
    seen.clear()
    chain = (model() | StrOutputParser() | RunnableLambda(picky)).with_fallbacks([model() | StrOutputParser()])
    with capture(stand_in) as trajectory:
        assert chain.invoke("hi") == "heard: hi"
    assert asked_and_unused(obedient, trajectory) == [("hi", True), ("hi", False)]


def test_a_hand_off_to_the_parent_graph_throws_nothing_away(stand_in: TrainableModel, obedient: ScriptedServer) -> None:
    def hands_off(state: Any) -> Any:
        answer = model().invoke("to whom?")
        return Command(goto="other", graph=Command.PARENT, update={"messages": [answer]})

    parent = StateGraph(MessagesState)
    parent.add_node("inner", one_node(hands_off).compile())
    parent.add_node("other", lambda state: {"messages": [model().invoke("I am other")]})
    parent.add_edge(START, "inner").add_edge("other", END)
    with capture(stand_in) as trajectory:
        parent.compile().invoke({"messages": []})
    assert asked_and_unused(obedient, trajectory) == [("to whom?", False), ("I am other", False)]


def test_a_limit_of_steps_throws_nothing_away(stand_in: TrainableModel, obedient: ScriptedServer) -> None:
    graph = one_node(lambda state: {"messages": [model().invoke("again")]})
    graph.add_edge("agent", "agent")
    with capture(stand_in) as trajectory, pytest.raises(GraphRecursionError):
        graph.compile().invoke({"messages": []}, {"recursion_limit": 2})
    assert asked_and_unused(obedient, trajectory) == [("again", False)] * len(obedient.calls(trajectory.id))


def test_a_message_says_which_call_made_it(stand_in: TrainableModel, obedient: ScriptedServer) -> None:
    with capture(stand_in) as trajectory:
        whole = model().invoke("hi")
        streamed = None
        for chunk in model().stream("hi"):
            streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    ids = [message.response_metadata["offbook"]["call_id"] for message in (whole, streamed)]
    assert ids == [call.id for call in obedient.calls(trajectory.id)]
    assert "token_ids" not in str(whole.response_metadata)


def test_calls_are_weighed_and_left_out_by_where_they_were_made(
    stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    def weight(origin: Any) -> bool | float:
        return False if origin.unused or "title" in origin.tags else 0.5 if origin.node == "agent" else True

    graph = one_node(lambda state: {"messages": [model().invoke("in the graph")]}).compile()
    with capture(stand_in, train_on=weight) as trajectory:
        model().invoke("a title", {"tags": ["title"]})
        graph.invoke({"messages": []})
        model().invoke("plain")
    by_text = {call.messages[-1]["content"]: trajectory.weights.get(call.id) for call in obedient.calls(trajectory.id)}
    assert by_text == {"a title": 0.0, "in the graph": 0.5, "plain": None}


@pytest.mark.parametrize("weight", [-1.0, float("nan"), "all", None])
def test_a_weight_that_is_none_is_refused(weight: Any, stand_in: TrainableModel) -> None:
    refused = pytest.raises(ConfigError, match="train_on: a bool or a number of at least 0 is needed")
    with refused, capture(stand_in, train_on=lambda origin: weight):
        model().invoke("hi")
