"""Rollouts never contaminate each other: threads and store namespaces that two of them meet in are an error."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.store.memory import InMemoryStore

from offbook import TrainableModel, current_trajectory
from offbook.base.errors import SharedStateError
from offbook_langgraph import capture, trainable

ASKED = {"messages": [("user", "hi")]}
SCENARIOS = [{"id": "a", "question": "hi"}]
OWN = {"model": "own", "api_key": "unused", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0}


def chat_graph(**options: Any) -> Any:
    model = ChatOpenAI(**OWN)
    graph: Any = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_edge(START, "agent")
    return graph.compile(**options)


@pytest.mark.parametrize("shared_state", ["error", "allow"])
def test_two_rollouts_in_one_thread_stop_with_an_error_unless_allowed(
    stand_in: TrainableModel, shared_state: Any
) -> None:
    graph = chat_graph(checkpointer=InMemorySaver())

    @trainable(model=stand_in, shared_state=shared_state)
    async def agent(scenario: dict[str, str]) -> float:
        state = await graph.ainvoke(ASKED, {"configurable": {"thread_id": "mine"}})
        return float(len(state["messages"]))

    if shared_state == "allow":
        assert agent.evaluate(SCENARIOS, rollouts=2).scored == 1
    else:
        with pytest.raises(
            SharedStateError,
            match=r"thread 'mine' of InMemorySaver: traj-.* wrote there before traj-.*offbook.current_trajectory\(\) or offbook.Trajectory\(\)\).id",
        ):
            agent.evaluate(SCENARIOS, rollouts=2)


def test_rollouts_of_a_wrapped_graph_have_threads_of_their_own(stand_in: TrainableModel) -> None:
    seen: list[int] = []

    def note(scenario: Any, state: Any) -> float:
        seen.append(len(state["messages"]))
        return 0.0

    trainable(chat_graph(checkpointer=InMemorySaver()), model=stand_in, reward=note).evaluate(SCENARIOS, rollouts=3)
    assert seen == [2, 2, 2]


def test_a_function_takes_its_thread_from_the_trajectory(stand_in: TrainableModel) -> None:
    graph = chat_graph(checkpointer=InMemorySaver())

    @trainable(model=stand_in)
    def agent(scenario: dict[str, str]) -> float:
        trajectory = current_trajectory()
        assert trajectory is not None
        return float(len(graph.invoke(ASKED, {"configurable": {"thread_id": trajectory.id}})["messages"]))

    assert agent.evaluate(SCENARIOS, rollouts=3).reward == 2.0


def test_a_thread_without_a_checkpointer_is_shared_by_nobody(stand_in: TrainableModel) -> None:
    graph = chat_graph()

    @trainable(model=stand_in)
    def agent(scenario: dict[str, str]) -> float:
        return float(len(graph.invoke(ASKED, {"configurable": {"thread_id": "mine"}})["messages"]))

    assert agent.evaluate(SCENARIOS, rollouts=3).reward == 2.0


def test_one_trajectory_may_come_back_to_its_thread(stand_in: TrainableModel) -> None:
    graph = chat_graph(checkpointer=InMemorySaver())
    with capture(stand_in) as trajectory:
        for _ in range(2):
            state = graph.invoke(ASKED, {"configurable": {"thread_id": "t"}})
    assert len(state["messages"]) == 4
    with capture(stand_in, trajectory=trajectory):
        graph.invoke(ASKED, {"configurable": {"thread_id": "t"}})
    with pytest.raises(SharedStateError, match=r"thread 't'.*a factory"), capture(stand_in):
        graph.invoke(ASKED, {"configurable": {"thread_id": "t"}})


def test_outside_of_rollouts_threads_are_the_apps_own_business(stand_in: TrainableModel) -> None:
    graph = chat_graph(checkpointer=InMemorySaver())
    with capture(stand_in):
        graph.invoke(ASKED, {"configurable": {"thread_id": "t"}})
    assert len(graph.get_state({"configurable": {"thread_id": "t"}}).values["messages"]) == 2


@pytest.mark.parametrize(
    "reads",
    [
        lambda store: store.get(("users", "7"), "name"),
        lambda store: store.get(namespace=("users", "7"), key="name"),
        lambda store: store.search(("users",)),
        lambda store: store.put(("users", "7"), "name", {"x": 2}),
        lambda store: store.delete(("users", "7"), "name"),
    ],
)
def test_a_store_namespace_that_another_rollout_has_written_is_an_error(stand_in: TrainableModel, reads: Any) -> None:
    store = InMemoryStore()
    with capture(stand_in):
        store.put(("users", "7"), "name", {"x": 1})
        reads(store)
    with pytest.raises(SharedStateError, match=r"store namespace \('users'.*part of the namespace"), capture(stand_in):
        reads(store)


async def test_async_reads_are_seen_too(stand_in: TrainableModel) -> None:
    store = InMemoryStore()
    async with capture(stand_in):
        await store.aput(("users", "7"), "name", {"x": 1})
    with pytest.raises(SharedStateError, match="store namespace"):
        async with capture(stand_in):
            await store.asearch(("users",))


def test_knowledge_that_no_rollout_writes_is_shared_by_all(stand_in: TrainableModel) -> None:
    store = InMemoryStore()
    store.put(("docs",), "a", {"text": "known"})
    for number in range(2):
        with capture(stand_in):
            assert store.search(("docs",))
            store.put(("mine", str(number)), "a", {"x": 1})
            assert store.get(("docs",), "a") is not None


def test_a_fault_that_the_app_swallowed_is_raised_at_the_end(stand_in: TrainableModel) -> None:
    store = InMemoryStore()
    with capture(stand_in):
        store.put(("users",), "name", {"x": 1})
    with pytest.raises(SharedStateError), capture(stand_in):
        try:
            store.get(("users",), "name")
        except RuntimeError:
            swallowed = True
        assert swallowed
