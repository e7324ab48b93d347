"""Agents with middleware: it chooses models, prompts and tools, tries again, summarises, and lets a person in."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    LLMToolEmulator,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    ModelRequest,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    dynamic_prompt,
    wrap_model_call,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from offbook.base.types import CallStatus

from .apps import add, asked, double, last, own_model
from .policy import Policy, names_of, one_branch, origins

THREAD: Any = {"configurable": {"thread_id": "t-1"}}


def test_an_agent_with_a_model_chosen_by_middleware(policy: Policy) -> None:
    large = own_model(model="gpt-large")

    @wrap_model_call
    def escalate(request: ModelRequest, handler: Any) -> Any:
        return handler(request.override(model=large) if len(request.messages) > 1 else request)

    app = create_agent(own_model(model="gpt-small"), [add], middleware=[escalate])
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    assert [origin.model for origin in origins(made.calls(2))] == ["gpt-small", "gpt-large"]


async def test_an_agent_with_settings_tools_and_tool_choice_set_by_async_middleware(policy: Policy) -> None:
    class Force(AgentMiddleware):
        async def awrap_model_call(self, request: ModelRequest, handler: Any) -> Any:
            if len(request.messages) > 1:
                return await handler(request)
            settings = {"stop": ["END"], "temperature": 0}
            return await handler(request.override(tool_choice="any", tools=[double], model_settings=settings))

    app = create_agent(own_model(), [add, double], middleware=[Force()])
    async with policy.rollout() as made:
        state = await app.ainvoke(asked("hello"))
    assert last(state) == "the tools said 14"
    assert made.calls(2)[0].constrained == "tool_choice"
    first, second = made.requests
    assert (first["tool_choice"], first["stop"], names_of(first["tools"])) == ("required", ["END"], ["double"])
    assert first["temperature"] == 1.0
    assert names_of(second["tools"]) == ["add", "double"]


def test_an_agent_with_a_dynamic_prompt(policy: Policy) -> None:
    @dynamic_prompt
    def prompt(request: ModelRequest) -> str:
        return f"Message {len(request.messages)}."

    app = create_agent(own_model(), [add], middleware=[prompt])
    with policy.rollout() as made:
        app.invoke(asked("add(a=1, b=2)"))
    assert [call.messages[0]["content"] for call in made.calls(2)] == ["Message 1.", "Message 3."]


def test_a_person_in_the_loop_who_edits_a_tool_call(policy: Policy) -> None:
    middleware: Any = HumanInTheLoopMiddleware(interrupt_on={"add": True})
    app = create_agent(own_model(), [add], middleware=[middleware], checkpointer=InMemorySaver())
    edited = {"type": "edit", "edited_action": {"name": "add", "args": {"a": 10, "b": 20}}}
    with policy.rollout() as made:
        app.invoke(asked("add(a=1, b=2)"), THREAD)
        assert last(app.invoke(Command(resume={"decisions": [edited]}), THREAD)).endswith("30")
    calls = made.calls(2)
    assert "human reviewer" in calls[1].messages[-1]["content"]  # the message keeps the call that was sampled
    assert one_branch(calls)


def test_a_person_in_the_loop_who_rejects_a_tool_call(policy: Policy) -> None:
    middleware: Any = HumanInTheLoopMiddleware(interrupt_on={"add": True})
    app = create_agent(own_model(), [add], middleware=[middleware], checkpointer=InMemorySaver())
    with policy.rollout() as made:
        app.invoke(asked("add(a=1, b=2)"), THREAD)
        rejected = Command(resume={"decisions": [{"type": "reject", "message": "not today"}]})
        assert last(app.invoke(rejected, THREAD)).endswith("not today")
    assert one_branch(made.calls(2))


@pytest.mark.parametrize("kind", ["retry", "fallback"])
def test_middleware_that_tries_again(policy: Policy, kind: str) -> None:
    again: dict[str, Any] = {
        "retry": ModelRetryMiddleware(max_retries=1, initial_delay=0.01),
        "fallback": ModelFallbackMiddleware(own_model(model="second")),
    }
    policy.refuse_next(500, "out of luck")
    with policy.rollout() as made:
        state = create_agent(own_model(), [add], middleware=[again[kind]]).invoke(asked("add(a=1, b=2)"))
    assert last(state) == "the tools said 3"
    statuses = [call.status for call in made.recorded(3)]
    assert statuses == [CallStatus.FAILED, CallStatus.COMPLETE, CallStatus.COMPLETE]


def test_middleware_that_summarises(policy: Policy) -> None:
    summary: Any = SummarizationMiddleware(own_model(), trigger=("messages", 3), keep=("messages", 1))
    app = create_agent(own_model(), [add], middleware=[summary])
    with policy.rollout() as made:
        app.invoke(asked("add(a=1, b=2)"))
    nodes = [origin.node for origin in origins(made.calls(3))]
    assert nodes == ["model", "SummarizationMiddleware.before_model", "model"]


def test_middleware_that_selects_tools(policy: Policy) -> None:
    selector: Any = LLMToolSelectorMiddleware(model=own_model(), max_tools=1)
    app = create_agent(own_model(), [add, double], middleware=[selector])
    with policy.rollout() as made:
        assert last(app.invoke(asked("add(a=1, b=2)"))) == "the tools said 3"
    made.calls(4)
    assert [names_of(request.get("tools") or []) for request in made.requests] == [[], ["add"], [], ["add"]]


def test_middleware_that_plays_the_tools(policy: Policy) -> None:
    emulator: Any = LLMToolEmulator(model=own_model())
    with policy.rollout() as made:
        state = create_agent(own_model(), [add], middleware=[emulator]).invoke(asked("add(a=1, b=2)"))
    assert state["messages"][2].text.startswith("heard: ")
    assert [origin.node for origin in origins(made.calls(3))] == ["model", "tools", "model"]
