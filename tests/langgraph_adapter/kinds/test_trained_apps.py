"""The same kinds through `trainable`: rollouts of a wrapped app, and `trained()`, the app that the policy answers."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.output_parsers import StrOutputParser
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph

from offbook import Trajectory, current_trajectory
from offbook_langgraph import trainable

from .apps import add, asked, last, own_model
from .policy import Policy

ORDER = "add(a=1, b=2)"
SAID = "the tools said 3"
SCENARIOS = [{"id": str(number), "question": f"add(a=1, b={number})"} for number in (1, 2)]


def right(scenario: Any, state: Any) -> float:
    return float(last(state) == f"the tools said {1 + int(scenario['id'])}")


def wrapped(policy: Policy, app: Any) -> Any:
    return trainable(app, model=policy.model, reward=right)


async def recorded(policy: Policy, agent: Any) -> list[int]:
    """Evaluate; the number of calls that were recorded for each rollout."""
    seen: list[Trajectory] = []

    def score(scenario: Any, state: Any) -> float:
        trajectory = current_trajectory()
        assert trajectory is not None
        seen.append(trajectory)
        return right(scenario, state)

    found = await trainable(agent, model=policy.model, reward=score).aevaluate(SCENARIOS)
    assert (found.reward, found.failed) == (1.0, 0)
    return [len(policy.server.calls(each.id)) for each in seen]


async def test_rollouts_of_a_graph(policy: Policy) -> None:
    assert await recorded(policy, create_agent(own_model(), [add], checkpointer=InMemorySaver())) == [2, 2]


async def test_rollouts_of_an_async_function(policy: Policy) -> None:
    app = create_agent(own_model(), [add])

    async def agent(scenario: Any) -> Any:
        return await app.ainvoke(asked(scenario["question"]))

    assert await recorded(policy, agent) == [2, 2]


async def test_rollouts_of_a_sync_function(policy: Policy) -> None:
    app = create_agent(own_model(), [add])

    def agent(scenario: Any) -> Any:
        return app.invoke(asked(scenario["question"]))

    assert await recorded(policy, agent) == [2, 2]


async def test_rollouts_of_a_workflow_of_the_functional_api(policy: Policy) -> None:
    @task
    def ask(question: str) -> Any:
        return create_agent(own_model(), [add]).invoke(asked(question))

    @entrypoint()
    def workflow(scenario: Any) -> Any:
        return ask(scenario["question"]).result()

    assert await recorded(policy, workflow) == [2, 2]


def test_a_trained_graph_is_streamed(policy: Policy) -> None:
    trained = wrapped(policy, create_agent(own_model(), [add])).trained()
    chunks = [chunk for chunk, _ in trained.stream(asked(ORDER), stream_mode="messages")]
    assert "".join(chunk.text for chunk in chunks if chunk.type == "AIMessageChunk") == SAID


async def test_a_trained_graph_is_streamed_async_and_as_events_v2(policy: Policy) -> None:
    trained = wrapped(policy, create_agent(own_model(), [add])).trained()
    values = [state async for state in trained.astream(asked(ORDER), stream_mode="values")]
    events: list[Any] = [event async for event in trained.astream_events(asked(ORDER), version="v2")]
    assert last(values[-1]) == last(events[-1]["data"]["output"]) == SAID


def test_a_trained_graph_is_streamed_as_events_v3(policy: Policy) -> None:
    run = wrapped(policy, create_agent(own_model(), [add])).trained().stream_events(asked(ORDER), version="v3")
    assert ["".join(message.text) for message in run.messages] == ["", SAID]
    assert last(run.output) == SAID


async def test_a_trained_graph_is_streamed_as_async_events_v3(policy: Policy) -> None:
    trained = wrapped(policy, create_agent(own_model(), [add])).trained()
    run = await trained.astream_events(asked(ORDER), version="v3")
    assert last(await run.output()) == SAID


def test_a_trained_graph_runs_a_batch(policy: Policy) -> None:
    trained = wrapped(policy, create_agent(own_model(), [add])).trained()
    assert [last(state) for state in trained.batch([asked(ORDER), asked(ORDER)])] == [SAID, SAID]


def test_a_trained_graph_keeps_its_checkpoints_and_its_config(policy: Policy) -> None:
    trained = wrapped(policy, create_agent(own_model(), [add], checkpointer=InMemorySaver())).trained()
    config: Any = {"configurable": {"thread_id": "t-1"}}
    trained.with_config(tags=["mine"]).invoke(asked(ORDER), config)
    assert last(trained.get_state(config).values) == SAID


@pytest.mark.parametrize("how", ["node", "call"])
def test_a_trained_graph_inside_another_graph(policy: Policy, how: str) -> None:
    trained = wrapped(policy, create_agent(own_model(), [add])).trained()

    def call(state: MessagesState) -> Any:
        return trained.invoke(state)

    node = trained if how == "node" else call
    app = StateGraph(MessagesState).add_node("inner", node).add_edge(START, "inner").compile()
    assert last(app.invoke(asked(ORDER))) == SAID
    assert last(list(app.stream(asked(ORDER), stream_mode="values"))[-1]) == SAID


def test_a_trained_model_in_a_longer_chain(policy: Policy) -> None:
    model: Any = trainable(own_model(), model=policy.model, reward=lambda scenario, message: 0.0)
    assert (model.trained() | StrOutputParser()).invoke("hi") == "heard: hi"


async def test_what_a_trained_app_is_asked_is_not_recorded(policy: Policy) -> None:
    before = len(policy.server.sampler.received)
    await wrapped(policy, create_agent(own_model(), [add])).trained().ainvoke(asked(ORDER))
    sent = policy.server.sampler.received[before:]
    assert len(sent) == 2
    assert not any("return_token_ids" in request for request in sent)
