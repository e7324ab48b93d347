"""Memory as `langmem` has it: tools of an agent, and managers that extract it from conversations."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langgraph.store.memory import InMemoryStore
from langmem import (
    ReflectionExecutor,
    create_manage_memory_tool,
    create_memory_manager,
    create_memory_store_manager,
    create_search_memory_tool,
)

from offbook import TrainableModel

from .apps import TEAL, City, asked, last, own_model
from .one_step import calls_of_a_trained_step
from .policy import Policy, names_of, one_branch, origins

PLACE = ("memories",)


def assistant() -> Any:
    """An agent with a memory of its own."""
    tools = [create_manage_memory_tool(PLACE), create_search_memory_tool(PLACE)]
    return create_agent(own_model(max_tokens=64), tools, store=InMemoryStore(), name="assistant")


async def test_an_agent_keeps_a_memory_and_finds_it(policy: Policy) -> None:
    app = assistant()
    order = "manage_memory(content='likes teal', action='create') then search_memory(query='teal')"
    async with policy.rollout() as made:
        state = await app.ainvoke(asked(order))
    assert "created memory" in last(state) and '"value":{"content":"likes teal"}' in last(state)
    assert [item.value for item in app.store.search(PLACE)] == [{"content": "likes teal"}]
    recorded = made.calls(3)
    assert one_branch(recorded)
    assert {origin.agent for origin in origins(recorded)} == {"assistant"}


async def test_a_manager_extracts_memories_from_a_conversation(policy: Policy) -> None:
    manager: Any = create_memory_manager(own_model(), schemas=[City])
    async with policy.rollout() as made:
        [memory] = await manager.ainvoke({"messages": [{"role": "user", "content": "City(city='teal', size=7)"}]})
    assert memory.content == TEAL
    made.calls(1)
    assert names_of(made.requests[0]["tools"]) == ["City"]


def test_a_manager_keeps_them_in_a_store(policy: Policy) -> None:
    store = InMemoryStore()
    manager: Any = create_memory_store_manager(own_model(), schemas=[City], namespace=PLACE, store=store)
    with policy.rollout() as made:
        manager.invoke({"messages": [{"role": "user", "content": "City(city='teal', size=7)"}]})
    assert [item.value["content"] for item in store.search(PLACE)] == [TEAL.model_dump()]
    made.calls(1)


def test_a_reflection_that_the_rollout_waits_for_is_captured(policy: Policy) -> None:
    store = InMemoryStore()
    manager: Any = create_memory_store_manager(own_model(), schemas=[City], namespace=PLACE, store=store)
    with policy.rollout() as made:
        reflections = ReflectionExecutor(manager, store=store)
        conversation = {"messages": [{"role": "user", "content": "City(city='teal', size=7)"}]}
        reflections.submit(conversation, config={"configurable": {"thread_id": "a"}}).result(timeout=60)
    reflections.shutdown()
    assert [item.value["content"] for item in store.search(PLACE)] == [TEAL.model_dump()]
    made.calls(1)


def test_an_agent_with_a_memory_is_trained(model: TrainableModel) -> None:
    rollouts = calls_of_a_trained_step(assistant, model, "what is the memory of 'teal'?")
    assert {origin.agent for calls in rollouts for origin in origins(calls)} == {"assistant"}
