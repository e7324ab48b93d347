"""When tools ran is recorded with the trajectory, durable on the server, and the time of their spans."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import RetryPolicy

from offbook import TrainableModel, Trajectory
from offbook.base.wire import RolloutTrace, TracePage
from offbook.testing import ScriptedServer
from offbook_langgraph import capture, observe, trainable
from offbook_sinks.spans import SpanKind, TraceSpan, rollout_spans
from tests.langgraph_adapter.kinds.apps import asked, own_model

SECONDS = 0.15


@tool
def slow(city: str) -> str:
    """A tool that takes its time."""
    time.sleep(SECONDS)
    return f"slow {city}"


@tool
async def slow_too(city: str) -> str:
    """An async tool that takes its time."""
    await asyncio.sleep(SECONDS)
    return f"async {city}"


@tool
def broken(city: str) -> str:
    """A tool that raises."""
    raise KeyError(city)


@tool(return_direct=True)
def final(city: str) -> str:
    """A tool whose answer ends the rollout."""
    return f"the end of {city}"


async def traced(app: Any, model: TrainableModel, server: ScriptedServer, order: str) -> RolloutTrace:
    """The rollout as the server has it."""
    result = await trainable(app, model=model, reward=lambda scenario, state: 1.0).aevaluate(
        [{"id": order, "question": order}]
    )
    assert result.failed == 0, result.failures
    [rollout] = recorded(model, server)
    return rollout


def recorded(model: TrainableModel, server: ScriptedServer) -> tuple[RolloutTrace, ...]:
    page = server.http.get("/api/traces", params={"model": model.name})
    return TracePage.model_validate_json(page.content).rollouts


def tools_of(rollout: RolloutTrace) -> list[TraceSpan]:
    return [span for span in rollout_spans(rollout) if span.kind is SpanKind.TOOL]


def asking(model: Any, tool: Any) -> Any:
    """A node that asks the model, which has the tool."""

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.bind_tools([tool]).invoke(state["messages"])]}

    return ask


async def test_sync_and_async_tools_of_one_turn_are_timed_where_they_ran(
    obedient: ScriptedServer, stand_in: TrainableModel
) -> None:
    app = create_agent(own_model(), [slow, slow_too])
    rollout = await traced(app, stand_in, obedient, "slow(city='teal') and slow_too(city='pink')")
    first, second = rollout.record.tool_runs
    assert {first.name, second.name} == {"slow", "slow_too"}
    asking, seeing = rollout.calls
    ids = [each["id"] for each in asking.outputs[0].message["tool_calls"]]
    assert {first.tool_call_id, second.tool_call_id} == set(ids)
    for run in (first, second):
        assert asking.ended_at <= run.started_at and run.ended_at <= seeing.started_at
        assert run.ended_at - run.started_at >= SECONDS * 0.9
        assert (run.error, run.result) == (None, None)  # the result is in the messages of the next call
    assert second.started_at < first.ended_at, "a ToolNode runs the tools of one turn at once"
    spans = {span.name: span for span in tools_of(rollout)}
    assert spans["slow"].output == "slow teal" and spans["slow_too"].output == "async pink"
    for run in (first, second):
        span = spans[run.name]
        assert (span.facts or {})["timing"] == "recorded: when the tool ran"
        assert abs(span.end / 1e9 - run.ended_at) < 0.003 and abs(span.start / 1e9 - run.started_at) < 0.003


def test_tools_of_a_sync_graph_that_run_in_threads_are_timed(
    obedient: ScriptedServer, stand_in: TrainableModel
) -> None:
    graph = StateGraph(MessagesState)
    model = own_model()
    graph.add_node("ask", asking(model, slow))
    graph.add_node("tools", ToolNode([slow])).add_edge(START, "ask").add_edge("tools", "ask")
    app = graph.add_conditional_edges("ask", tools_condition).compile()
    with capture(stand_in) as trajectory:
        app.invoke(asked("slow(city='a') and slow(city='b')"))
    first, second = trajectory.tool_runs
    assert first.started_at < second.started_at < first.ended_at


async def test_a_tool_that_raises_has_its_error_whether_the_app_handles_it_or_not(
    obedient: ScriptedServer, stand_in: TrainableModel
) -> None:
    graph = StateGraph(MessagesState)
    model = own_model()
    graph.add_node("ask", asking(model, broken))
    graph.add_node("tools", ToolNode([broken], handle_tool_errors=True)).add_edge(START, "ask").add_edge("tools", "ask")
    handled = graph.add_conditional_edges("ask", tools_condition).compile()
    rollout = await traced(handled, stand_in, obedient, "broken(city='teal')")
    [run], [span] = rollout.record.tool_runs, tools_of(rollout)
    assert run.error == span.error == "KeyError: 'teal'" and run.result is None
    assert "KeyError" in str(span.output)
    with pytest.raises(KeyError), capture(stand_in) as trajectory:
        create_agent(own_model(), [broken]).invoke(asked("broken(city='pink')"))
    [lost] = trajectory.tool_runs
    assert (lost.name, lost.error) == ("broken", "KeyError: 'pink'")


async def test_a_tool_that_ran_again_has_a_span_for_each_run(
    obedient: ScriptedServer, stand_in: TrainableModel
) -> None:
    tries: list[str] = []

    @tool
    def shaky(city: str) -> str:
        """A tool that fails at first."""
        tries.append(city)
        if len(tries) == 1:
            raise ConnectionError("away")
        return "here"

    graph = StateGraph(MessagesState)
    model = own_model()
    graph.add_node("ask", asking(model, shaky))
    retry = RetryPolicy(max_attempts=2, initial_interval=0.01, retry_on=ConnectionError)
    graph.add_node("tools", ToolNode([shaky], handle_tool_errors=False), retry_policy=retry)
    app = graph.add_edge(START, "ask").add_edge("tools", "ask").add_conditional_edges("ask", tools_condition).compile()
    rollout = await traced(app, stand_in, obedient, "shaky(city='teal')")
    assert [run.error for run in rollout.record.tool_runs] == ["ConnectionError: away", None]
    spans = tools_of(rollout)
    assert [span.error for span in spans] == ["ConnectionError: away", None]
    assert len({span.key for span in spans}) == 2


async def test_the_result_that_no_model_call_saw_is_kept(obedient: ScriptedServer, stand_in: TrainableModel) -> None:
    rollout = await traced(create_agent(own_model(), [final]), stand_in, obedient, "final(city='teal')")
    [run], [span] = rollout.record.tool_runs, tools_of(rollout)
    assert run.result == span.output == "the end of teal"


def test_a_tool_that_the_app_calls_by_itself_is_no_run_of_the_models(stand_in: TrainableModel) -> None:
    with capture(stand_in) as trajectory:
        slow.invoke({"city": "teal"})
        own_model().invoke("hello")
    assert trajectory.tool_runs == []


def test_what_is_observed_has_its_tools_times(obedient: ScriptedServer) -> None:
    """The app's own model answers; here it is the stand-in's endpoint, asked without a capture."""
    model = ChatOpenAI(model="tiny", base_url=f"{obedient.url}/v1", api_key="none")  # pyright: ignore[reportArgumentType]
    with observe(on_leak="ignore") as trajectory:
        create_agent(model, [slow]).invoke(asked("slow(city='teal')"))
    [run] = trajectory.tool_runs
    assert (run.name, run.result) == ("slow", None)
    assert run.ended_at - run.started_at >= SECONDS * 0.9


async def test_a_trajectory_that_a_function_returns_keeps_the_times(
    obedient: ScriptedServer, stand_in: TrainableModel
) -> None:
    app = create_agent(own_model(), [slow])

    async def run(scenario: Any) -> Trajectory:
        await app.ainvoke(asked(scenario["question"]))
        return Trajectory(reward=1.0)

    await trainable(run, model=stand_in).aevaluate([{"id": "a", "question": "slow(city='teal')"}])
    [rollout] = recorded(stand_in, obedient)
    assert [each.name for each in rollout.record.tool_runs] == ["slow"]
