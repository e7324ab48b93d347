"""`agent` of a call's origin: the agent's name, whoever built the agent, in captures, in `observe` and in `trained()`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent

from offbook.testing import says, scripted_llm
from offbook_langgraph import observe, trainable

from .apps import add, asked, double, last, own_model
from .policy import Policy, origins

Require = Callable[[bool, str], None]


def package(name: str, require: Require) -> Any:
    """An optional package."""
    require(importlib.util.find_spec(name) is not None, "pip install -r requirements/test.txt")
    return importlib.import_module(name)


def supervised(require: Require) -> Any:
    """A supervisor of two react agents, as langgraph-supervisor builds it."""
    adder = create_react_agent(own_model(), [add], name="adder")
    doubler = create_react_agent(own_model(), [double], name="doubler")
    supervisor = package("langgraph_supervisor", require)
    return supervisor.create_supervisor([adder, doubler], model=own_model(), supervisor_name="boss").compile(
        name="team"
    )


def test_a_supervisor_and_its_react_agents(policy: Policy, require: Require) -> None:
    app = supervised(require)
    with policy.rollout() as made:
        app.invoke(asked("transfer_to_adder() then add(a=1, b=2)"))
    agents = [origin.agent for origin in origins(made.calls(4))]
    assert agents == ["boss", "adder", "adder", "boss"]


def test_a_supervisor_is_selected_and_served_by_its_name(policy: Policy, require: Require) -> None:
    app = supervised(require)
    with scripted_llm([says("mine")]) as own:
        adder = create_react_agent(own_model(base_url=own.url), [add], name="adder")
        supervisor = package("langgraph_supervisor", require)
        app = supervisor.create_supervisor([adder], model=own_model(), supervisor_name="boss").compile()
        trained = trainable(app, model=policy.model, reward="logged", select={"agent": "boss"}).trained()
        state = trained.invoke(asked("transfer_to_adder()"))
        assert [request.body["model"] for request in own.requests] == ["gpt-4.1-mini"]
    assert last(state).startswith("the tools said")


async def test_a_swarm_of_react_agents(policy: Policy, require: Require) -> None:
    swarm = package("langgraph_swarm", require)
    left = create_react_agent(own_model(), [swarm.create_handoff_tool(agent_name="right")], name="left")
    right = create_react_agent(own_model(), [double], name="right")
    app = swarm.create_swarm([left, right], default_active_agent="left").compile()
    async with policy.rollout() as made:
        await app.ainvoke(asked("transfer_to_right() then double(x=2)"))
    assert [origin.agent for origin in origins(made.calls(3))] == ["left", "right", "right"]


def test_a_react_agent_behind_a_tool_of_another_agent(policy: Policy) -> None:
    expert = create_react_agent(own_model(), [double], name="expert")

    @tool
    def ask_expert(order: str) -> str:
        """Ask the expert."""
        return last(expert.invoke(asked(order)))

    app = create_agent(own_model(), [ask_expert], name="boss")
    with policy.rollout() as made:
        app.invoke(asked("ask_expert(order='double(x=2)')"), {"run_name": "a run of the user's"})
    assert [origin.agent for origin in origins(made.calls(4))] == ["boss", "expert", "expert", "boss"]


def test_a_graph_without_a_name_has_that_of_the_one_around_it(policy: Policy) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [own_model().invoke(state["messages"], {"callbacks": []})]}

    inner = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    around = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner")
    with policy.rollout() as made:
        inner.invoke(asked("hi"))
        around.compile(name="around").invoke(asked("hi"))
        own_model().invoke("hi")
    assert [origin.agent for origin in origins(made.calls(3))] == [None, "around", None]


@pytest.mark.parametrize("build", [create_agent, create_react_agent])
def test_trained_apps_are_selected_by_agent(policy: Policy, build: Any) -> None:
    app = build(own_model(), [add], name="desk")
    trained = trainable(app, model=policy.model, reward="logged", select={"agent": "desk"}).trained()
    assert last(trained.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    assert "the tools said 3" in str(list(trained.stream(asked("add(a=1, b=2)"))))


def test_an_observation_knows_the_agents(policy: Policy) -> None:
    with scripted_llm([says("mine")]) as own, observe(select={"agent": "desk"}) as seen:
        create_react_agent(own_model(base_url=own.url), [add], name="desk").invoke(asked("hi"))
        create_react_agent(own_model(base_url=own.url), [add], name="other").invoke(asked("hi"))
    assert [call["agent"] for call in seen.metadata["calls"]] == ["desk"]
