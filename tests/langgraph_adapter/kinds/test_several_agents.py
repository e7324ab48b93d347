"""Several agents in one app: agents as tools, supervisors, swarms, teams, and several models of which some are trained."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, InjectedToolCallId, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, create_react_agent
from langgraph.types import Command

from offbook.base.types import CallOrigin
from offbook.client.rollouts.capture import histories_of
from offbook.testing import says, scripted_llm
from offbook_langgraph import capture

from .apps import add, asked, double, last, own_model
from .policy import Policy, names_of, one_branch, origins


def handing_over_to(agent: str) -> BaseTool:
    """A tool that hands the conversation over to another agent of the parent graph."""

    @tool(f"to_{agent}")
    def hand_over(
        state: Annotated[dict[str, Any], InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]
    ) -> Command[Any]:
        """Hand over."""
        note = ToolMessage(f"you are {agent}", tool_call_id=tool_call_id)
        return Command(goto=agent, graph=Command.PARENT, update={"messages": [*state["messages"], note]})

    return hand_over


def expert_tool() -> BaseTool:
    """An agent of its own behind a tool."""
    expert = create_agent(own_model(model="gpt-expert"), [double], name="expert")

    @tool
    def ask_expert(order: str) -> str:
        """Ask the expert."""
        return last(expert.invoke(asked(order)))

    return ask_expert


def test_an_agent_as_a_tool(policy: Policy) -> None:
    app = create_agent(own_model(), [expert_tool()], name="boss")
    with policy.rollout() as made:
        state = app.invoke(asked("ask_expert(order='double(x=2)')"))
    assert last(state) == "the tools said the tools said 4"
    calls = made.calls(4)
    agents = [origin.agent for origin in origins(calls)]
    assert agents == ["boss", "expert", "expert", "boss"]
    assert all(one_branch([call for call, by in zip(calls, agents, strict=True) if by == name]) for name in agents)


async def test_agents_as_async_tools_that_run_at_once(policy: Policy) -> None:
    expert = create_agent(own_model(), [double])

    @tool
    async def ask(order: str) -> str:
        """Ask the expert."""
        return last(await expert.ainvoke(asked(order)))

    app = create_agent(own_model(), [ask])
    async with policy.rollout() as made:
        state = await app.ainvoke(asked("ask(order='double(x=2)') and ask(order='double(x=3)')"))
    assert last(state) == "the tools said the tools said 4, the tools said 6"
    histories = histories_of(made.calls(6))
    assert sorted(len(history.messages_and_choices) for history in histories) == [4, 4, 5]


def test_an_agent_wrapped_as_a_tool_by_langchain(policy: Policy) -> None:
    expert = create_agent(own_model(), [double])
    as_tool = expert.as_tool(name="expert", description="Doubles.", arg_types={"messages": list})
    app = create_agent(own_model(), [as_tool])
    with policy.rollout() as made:
        state = app.invoke(asked("expert(messages=[['user', 'double(x=2)']])"))
    assert "the tools said 4" in state["messages"][2].text
    made.calls(4)


def test_a_supervisor_that_hands_over_by_commands(policy: Policy) -> None:
    boss = create_agent(own_model(), [handing_over_to("counter"), handing_over_to("doubler")], name="boss")
    counter = create_agent(own_model(), [add], name="counter")
    doubler = create_agent(own_model(), [double], name="doubler")
    graph = StateGraph(MessagesState).add_node("boss", boss, destinations=("counter", "doubler", END))
    graph.add_node("counter", counter).add_node("doubler", doubler)
    app = graph.add_edge(START, "boss").add_edge("counter", "boss").add_edge("doubler", "boss").compile()
    with policy.rollout() as made:
        state = app.invoke(asked("to_counter()"))
    assert last(state) == "the tools said you are counter"
    calls = made.calls(3)
    assert [origin.agent for origin in origins(calls)] == ["boss", "counter", "boss"]
    assert names_of(made.requests[0]["tools"]) == ["to_counter", "to_doubler"]


async def test_a_swarm_in_which_agents_hand_over_to_each_other(policy: Policy) -> None:
    left = create_react_agent(own_model(), [add, handing_over_to("right")], name="left")
    right = create_react_agent(own_model(), [double, handing_over_to("left")], name="right")
    graph = StateGraph(MessagesState).add_node("left", left, destinations=("right",))
    app = graph.add_node("right", right, destinations=("left",)).add_edge(START, "left").compile()
    async with policy.rollout() as made:
        state = await app.ainvoke(asked("to_right() then to_left() then add(a=1, b=2)"))
    assert last(state) == "the tools said you are right, you are left, 3"
    namespaces = [str(origin.namespace).split(":")[0] for origin in origins(made.calls(4))]
    assert namespaces == ["left", "right", "left", "left"]


def test_a_team_of_teams(policy: Policy) -> None:
    def team(name: str) -> Any:
        graph = StateGraph(MessagesState).add_node(name, create_agent(own_model(), [add], name=name))
        return graph.add_edge(START, name).compile()

    graph = StateGraph(MessagesState).add_node("sales", team("ada")).add_node("support", team("ben"))
    app = graph.add_edge(START, "sales").add_edge("sales", "support").compile()
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    calls = made.calls(3)  # ben finds that ada has done it
    assert [origin.agent for origin in origins(calls)] == ["ada", "ada", "ben"]
    assert [str(origin.namespace).split(":")[0] for origin in origins(calls)] == ["sales", "sales", "support"]


def test_a_router_that_goes_where_a_structured_answer_says(policy: Policy) -> None:
    from_model = own_model().with_structured_output(
        {"title": "Route", "type": "object", "properties": {"to": {"enum": ["writer"]}}, "required": ["to"]}
    )

    def route(state: MessagesState) -> Command[Literal["writer"]]:
        chosen: Any = from_model.invoke(state["messages"])
        return Command(goto=chosen["to"])

    def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [own_model().invoke(state["messages"])]}

    app = (
        StateGraph(MessagesState).add_node("route", route).add_node("writer", write).add_edge(START, "route").compile()
    )
    with policy.rollout() as made:
        assert last(app.invoke(asked("hi"))) == "heard: hi"
    assert [origin.node for origin in origins(made.calls(2))] == ["route", "writer"]


def two_models(own_url: str) -> Any:
    """A graph of a writer, which is to be trained, and a critic, which is not."""
    writer = own_model(model="gpt-writer", tags=["writing"])
    critic = own_model(model="gpt-critic", base_url=own_url, tags=["judging"])

    def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": [writer.invoke(state["messages"])]}

    def judge(state: MessagesState) -> dict[str, Any]:
        return {"messages": [HumanMessage(critic.invoke(state["messages"]).text)]}

    graph = StateGraph(MessagesState).add_node("write", write).add_node("judge", judge)
    return graph.add_edge(START, "write").add_edge("write", "judge").compile()


@pytest.mark.parametrize("selected_by", ["node", "tag", "name"])
def test_two_models_of_which_one_is_selected(policy: Policy, selected_by: str) -> None:
    def select(origin: CallOrigin) -> bool:
        facts = {"node": origin.node == "write", "tag": "writing" in origin.tags, "name": origin.model == "gpt-writer"}
        return facts[selected_by]

    with scripted_llm([says("not bad")]) as own, policy.rollout(select=select) as made:
        state = two_models(own.url).invoke(asked("a poem"))
    assert [message.text for message in state["messages"]] == ["a poem", "heard: a poem", "not bad"]
    made.calls(1)
    assert [request.body["model"] for request in own.requests] == ["gpt-critic"]
    assert "x-offbook-trajectory" not in own.requests[0].headers


def test_nested_captures_of_which_the_innermost_that_selects_a_call_has_it(policy: Policy) -> None:
    outer = policy.rollout(select=lambda origin: origin.node == "judge")
    inner = policy.rollout(select=lambda origin: origin.node == "write")
    with outer, inner:
        assert last(two_models("http://127.0.0.1:9/v1").invoke(asked("a poem"))) == "heard: a poem"
    own = [policy.server.calls(each.trajectory.id) for each in (outer, inner)]
    assert [[origin.node for origin in origins(calls)] for calls in own] == [["judge"], ["write"]]


async def test_nested_captures_give_the_calls_back_to_the_outer_one(policy: Policy) -> None:
    model = own_model()
    async with policy.rollout() as outer:
        await model.ainvoke("first")
        async with policy.rollout() as inner:
            await model.ainvoke("second")
        await asyncio.create_task(model.ainvoke("third"))
    told = [
        [call.messages[0]["content"] for call in policy.server.calls(each.trajectory.id)] for each in (outer, inner)
    ]
    assert told == [["first", "third"], ["second"]]


def test_a_model_inside_one_capture_is_left_alone_after_it(policy: Policy) -> None:
    with scripted_llm([says("mine")]) as own:
        model = own_model(base_url=own.url)
        with capture(policy.model) as trajectory:
            assert model.invoke("hi").text == "heard: hi"
        assert model.invoke("hi").text == "mine"
    assert len(policy.server.calls(trajectory.id)) == 1
