"""Single agents: `create_agent`, `create_react_agent`, hand-written loops, and every way of choosing their model."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.messages import SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, create_react_agent, tools_condition
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore

from .apps import TEAL, City, add, asked, double, last, own_model
from .policy import Policy, names_of, one_branch, origins


def test_an_agent_runs_its_tools_in_parallel_and_in_turn(policy: Policy) -> None:
    app = create_agent(own_model(), [add, double], system_prompt="Be brief.")
    with policy.rollout() as made:
        state = app.invoke(asked("add(a=1, b=2) and add(a=3, b=4) then double(x=5)"))
    assert last(state) == "the tools said 3, 7, 10"
    assert [call["args"] for call in state["messages"][1].tool_calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    calls = made.calls(3)
    assert one_branch(calls)
    assert names_of(made.requests[0]["tools"]) == ["add", "double"]
    assert calls[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert [(origin.node, origin.step) for origin in origins(calls)] == [
        ("model", 1),
        ("model", 3),
        ("model", 5),
    ]


async def test_an_async_agent(policy: Policy) -> None:
    app = create_agent(own_model(), [add], name="counter")
    async with policy.rollout() as made:
        state = await app.ainvoke(asked("add(a=1, b=2)"), {"configurable": {"thread_id": "t-1"}, "tags": ["nightly"]})
    assert last(state) == "the tools said 3"
    for origin in origins(made.calls(2)):
        assert (origin.agent, origin.thread, origin.model) == ("counter", "t-1", "gpt-4.1-mini")
        assert "nightly" in origin.tags


def test_an_agent_whose_model_is_a_string(policy: Policy) -> None:
    app = create_agent("openai:gpt-4.1-mini", [add])
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    assert origins(made.calls(2))[0].model == "gpt-4.1-mini"


@pytest.mark.parametrize("provider", ["openai", "anthropic", "groq"])
def test_an_agent_whose_model_is_chosen_in_the_config(policy: Policy, provider: str) -> None:
    model: Any = init_chat_model(temperature=0, max_tokens=50)
    app = create_agent(model, [add])  # bound to its tools before there is a model
    with policy.rollout() as made:
        config: RunnableConfig = {"configurable": {"model": "some-model", "model_provider": provider}}
        assert last(app.invoke(asked("add(a=1, b=2)"), config)) == "the tools said 3"
    made.calls(2)
    assert names_of(made.requests[0]["tools"]) == ["add"]
    assert made.requests[0]["temperature"] == 1.0
    assert made.requests[0].get("max_completion_tokens", made.requests[0].get("max_tokens")) == 50


def test_a_prebuilt_react_agent(policy: Policy) -> None:
    app = create_react_agent(own_model(), [add], prompt="Be brief.", name="counter")
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    calls = made.calls(2)
    assert one_branch(calls)
    assert [origin.node for origin in origins(calls)] == ["agent", "agent"]


async def test_a_prebuilt_react_agent_that_runs_out_of_steps(policy: Policy) -> None:
    app = create_react_agent(own_model(), [add])
    async with policy.rollout() as made:
        state = await app.ainvoke(asked("add(a=1, b=2) then add(a=3, b=4)"), {"recursion_limit": 4})
    assert last(state) == "Sorry, need more steps to process this request."
    assert made.calls(2)[1].outputs[0].message["tool_calls"]  # what was sampled, not what the state says


def test_a_prebuilt_react_agent_whose_model_is_chosen_by_a_function(policy: Policy) -> None:
    def choose(state: Any, runtime: Any) -> Any:
        return own_model(model=f"gpt-{len(state['messages'])}").bind_tools([add])

    app = create_react_agent(choose, [add])
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    assert [origin.model for origin in origins(made.calls(2))] == ["gpt-1", "gpt-3"]


def test_a_hand_written_loop_with_a_tool_node(policy: Policy) -> None:
    model = own_model().bind_tools([add, double], parallel_tool_calls=False)

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SystemMessage("Be brief."), *state["messages"]])]}

    graph = StateGraph(MessagesState).add_node("think", think).add_node("tools", ToolNode([add, double]))
    graph.add_edge(START, "think").add_conditional_edges("think", tools_condition).add_edge("tools", "think")
    app = graph.compile()
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2) and double(x=3)"))) == "the tools said 3"
    assert one_branch(made.calls(2))
    assert [request["parallel_tool_calls"] for request in made.requests] == [False, False]


def test_an_agent_with_several_tool_calls_in_one_message_run_by_a_tool_node(policy: Policy) -> None:
    app = create_react_agent(own_model(), ToolNode([add, double]))
    with policy.rollout() as made:
        state = app.invoke(asked("add(a=1, b=2) and double(x=3) and double(x=4)"))
    assert last(state) == "the tools said 3, 6, 8"
    assert [message["content"] for message in made.calls(2)[1].messages[-3:]] == ["3", "6", "8"]


def test_an_agent_whose_tools_raise_or_get_arguments_that_do_not_fit(policy: Policy) -> None:
    @tool
    def fail(reason: str) -> str:
        """Always fails."""
        raise ValueError(reason)

    app = create_agent(own_model(), [*ToolNode([add, fail], handle_tool_errors=True).tools_by_name.values()])
    with policy.rollout() as made:
        state = app.invoke(asked("add(a='one') then add(a=1, b=2)"))
    assert last(state).endswith(", 3")
    assert "Error" in state["messages"][2].text
    assert one_branch(made.calls(3))


def test_an_agent_with_long_term_memory(policy: Policy) -> None:
    def think(state: MessagesState, store: BaseStore) -> dict[str, Any]:
        known = [item.value["fact"] for item in store.search(("facts",))]
        store.put(("facts",), str(len(known)), {"fact": state["messages"][-1].text})
        return {"messages": [own_model().invoke([SystemMessage(f"Known: {known}"), *state["messages"]])]}

    app = StateGraph(MessagesState).add_node("think", think).add_edge(START, "think").compile(store=InMemoryStore())
    with policy.rollout() as made:
        app.invoke(asked("I am Ada"))
        assert last(app.invoke(asked("who am I?"))) == "heard: who am I?"
    assert made.calls(2)[1].messages[0]["content"] == "Known: ['I am Ada']"


def test_an_agent_whose_tools_read_its_state_and_store(policy: Policy) -> None:
    @tool
    def count(state: Annotated[dict[str, Any], InjectedState], unit: str) -> str:
        """How many messages there are."""
        return f"{len(state['messages'])} {unit}"

    app = create_agent(own_model(), [count], store=InMemoryStore())
    with policy.rollout() as made:
        assert last(app.invoke(asked("count(unit='messages')"))) == "the tools said 2 messages"
    made.calls(2)
    assert list(made.requests[0]["tools"][0]["function"]["parameters"]["properties"]) == ["unit"]


def test_a_prebuilt_react_agent_that_ends_with_an_object(policy: Policy) -> None:
    app = create_react_agent(own_model(), [add], response_format=City)
    with policy.rollout() as made:
        assert app.invoke(asked("add(a=1, b=2)"))["structured_response"] == TEAL
    nodes = [origin.node for origin in origins(made.calls(3))]
    assert nodes == ["agent", "agent", "generate_structured_response"]
    assert made.requests[2]["response_format"]["json_schema"]["name"] == "City"


def test_a_prebuilt_react_agent_whose_hook_asks_a_model(policy: Policy) -> None:
    def summarise(state: Any) -> dict[str, Any]:
        summary = own_model().invoke("summarise " + state["messages"][-1].text).text
        return {"llm_input_messages": [SystemMessage(summary), *state["messages"]]}

    app = create_react_agent(own_model(), [add], pre_model_hook=summarise)
    with policy.rollout() as made:
        assert last(app.invoke(asked("hi"))) == "heard: hi"
    calls = made.calls(2)
    assert [origin.node for origin in origins(calls)] == ["pre_model_hook", "agent"]
    assert calls[1].messages[0]["content"] == "heard: summarise hi"
