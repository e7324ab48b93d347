"""Deep agents: planning, files and sub-agents, as `deepagents` builds them."""

from __future__ import annotations

from typing import Any

import pytest
from deepagents import create_deep_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from offbook import TrainableModel
from offbook.testing import LlmReply, LlmRequest, calls_tool, says, scripted_llm
from offbook_langgraph import trainable

from .apps import add, asked, double, last, own_model
from .one_step import calls_of_a_trained_step
from .policy import Policy, names_of, one_branch, origins

DELEGATED = "task(description='add(a=1, b=2)', subagent_type='adder')"
ADDER: Any = {"name": "adder", "description": "Adds numbers.", "system_prompt": "You add.", "tools": [add]}


def deep_agent(lead: Any = None, **options: Any) -> Any:
    """A lead with files and a sub-agent. The sub-agent inherits the lead's model."""
    return create_deep_agent(
        lead or own_model(), [double], system_prompt="You lead.", subagents=[ADDER], name="lead", **options
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_deep_agent_writes_a_file_and_asks_its_sub_agent(policy: Policy, streamed: bool) -> None:
    order = asked(f"write_file(file_path='/notes.md', content='teal') then {DELEGATED} then double(x=4)")
    async with policy.rollout() as made:
        if streamed:
            state = [state async for state in deep_agent().astream(order, stream_mode="values")][-1]
        else:
            state = await deep_agent().ainvoke(order)
    assert last(state) == "the tools said Updated file /notes.md, the tools said 3, 8"
    assert state["files"]["/notes.md"]["content"] == "teal"
    recorded = made.calls(6)
    by_agent = {
        name: [call for call in recorded if call.origin and call.origin.agent == name] for name in ("lead", "adder")
    }
    assert [len(calls) for calls in by_agent.values()] == [4, 2]
    assert all(one_branch(calls) for calls in by_agent.values())
    assert "task" in names_of(made.requests[0]["tools"])
    assert {origin.node for origin in origins(recorded)} == {"model"}


def test_a_deep_agent_on_a_model_named_by_a_string(policy: Policy) -> None:
    with policy.rollout() as made:
        assert last(deep_agent("openai:gpt-4.1-mini").invoke(asked(DELEGATED))) == "the tools said the tools said 3"
    assert [origin.agent for origin in origins(made.calls(4))] == ["lead", "adder", "adder", "lead"]


def test_only_the_sub_agent_goes_to_the_policy(policy: Policy) -> None:
    def lead(request: LlmRequest) -> LlmReply:
        if request.messages[-1]["role"] == "tool":
            return says("thank you")
        return calls_tool("task", {"description": "add(a=1, b=2)", "subagent_type": "adder"})

    with scripted_llm(lead) as own, policy.rollout(select={"agent": "adder"}) as made:
        assert last(deep_agent(own_model(base_url=own.url)).invoke(asked("three, please"))) == "thank you"
    assert [origin.agent for origin in origins(made.calls(2))] == ["adder", "adder"]
    assert len(own.requests) == 2


def test_a_deep_agent_that_waits_for_a_person_goes_on_where_it_was(policy: Policy) -> None:
    app = deep_agent(interrupt_on={"double": True}, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "a"}}
    with policy.rollout() as made:
        assert app.invoke(asked("double(x=4)"), config)["__interrupt__"]
        assert last(app.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)) == "the tools said 8"
    assert one_branch(made.calls(2))


def test_a_trained_deep_agent_is_answered_by_the_policy(policy: Policy) -> None:
    trained = trainable(deep_agent(), model=policy.model, reward="logged").trained()
    assert last(trained.invoke(asked(DELEGATED))) == "the tools said the tools said 3"


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_deep_agent_is_trained(model: TrainableModel) -> None:
    app = deep_agent(own_model(max_tokens=64))
    rollouts = calls_of_a_trained_step(app, model, "what is the double of 4?")
    assert {origin.agent for calls in rollouts for origin in origins(calls)} <= {"lead", "adder", "general-purpose"}
