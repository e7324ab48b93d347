"""Agents of OpenAI's Agents SDK."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from agents import (
    Agent,
    AgentHooks,
    AgentsException,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from offbook import TrainableModel, Trajectory, TrajectoryGroup
from offbook.base.types import new_id
from offbook.testing import ScriptedServer

from .rollouts import QUESTIONS, client_for, one_branch, recorded, shown, trained

UNTRACED = RunConfig(tracing_disabled=True)  # the SDK sends traces to OpenAI otherwise


class City(BaseModel):
    """A city."""

    city: str
    size: int


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def box_size(box: str) -> str:
    """The size of a box."""
    return box[::-1]


async def test_an_agent_calls_tools(served: ScriptedServer) -> None:
    rollout = new_id("traj")
    async with client_for(served, rollout) as client:
        desk = Agent(
            name="desk", instructions="Be brief.", model=OpenAIChatCompletionsModel("default", client), tools=[add]
        )
        run = await Runner.run(desk, "add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)", run_config=UNTRACED)
    assert run.final_output == "the tools said 3, 7, 11"
    assert one_branch(recorded(served, rollout, 3))


async def test_an_agent_hands_over_to_another(served: ScriptedServer) -> None:
    rollout = new_id("traj")
    async with client_for(served, rollout) as client:
        model = OpenAIChatCompletionsModel("default", client)
        adder = Agent(name="adder", instructions="Add.", model=model, tools=[add])
        desk = Agent(name="desk", instructions="Hand over.", model=model, handoffs=[adder])
        run = await Runner.run(desk, "transfer_to_adder() then add(a=1, b=2)", run_config=UNTRACED)
    assert run.last_agent is adder
    system = [call.messages[0]["content"] for call in recorded(served, rollout, 3)]
    assert system == ["Hand over.", "Add.", "Add."]


async def test_a_streamed_agent_ends_with_an_object(served: ScriptedServer) -> None:
    rollout = new_id("traj")
    async with client_for(served, rollout) as client:
        model = OpenAIChatCompletionsModel("default", client)
        desk = Agent(name="desk", model=model, tools=[add], output_type=City)
        run = Runner.run_streamed(desk, "add(a=1, b=2)", run_config=UNTRACED)
        events = [event.type async for event in run.stream_events()]
    assert "raw_response_event" in events and run.final_output == City(city="teal", size=7)
    calls = recorded(served, rollout, 2)
    assert one_branch(calls)
    assert [call.constrained for call in calls] == ["response_format", "response_format"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_default_model_calls_tools(served: ScriptedServer, streamed: bool) -> None:
    rollout = new_id("traj")
    async with client_for(served, rollout) as client:
        desk = Agent(name="desk", instructions="Be brief.", model=OpenAIResponsesModel("default", client), tools=[add])
        task = "add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)"
        if streamed:
            run = Runner.run_streamed(desk, task, run_config=UNTRACED)
            events = [event.type async for event in run.stream_events()]
            assert "raw_response_event" in events
        else:
            run = await Runner.run(desk, task, run_config=UNTRACED)
    assert run.final_output == "the tools said 3, 7, 11"
    shown(served, "openai-agents", "Responses", recorded(served, rollout, 3))


async def test_the_default_model_goes_on_from_a_recorded_response(served: ScriptedServer) -> None:
    rollout = new_id("traj")
    async with client_for(served, rollout) as client:
        desk = Agent(name="desk", model=OpenAIResponsesModel("default", client), tools=[add])
        run = await Runner.run(
            desk, "add(a=1, b=2) then add(a=5, b=6)", auto_previous_response_id=True, run_config=UNTRACED
        )
    assert run.final_output == "the tools said 3, 11"
    assert one_branch(recorded(served, rollout, 3))


class Counted(AgentHooks[Any]):
    """How many calls an agent made, also where it ended in an exception."""

    calls = 0

    async def on_llm_end(self, *_: object) -> None:
        self.calls += 1


@pytest.mark.slow("whole trainings")
async def test_an_agent_is_trained_through_the_models_own_client(model: TrainableModel) -> None:
    async def run(question: str) -> int:
        hooks = Counted()
        chat = OpenAIChatCompletionsModel(model.name, model.openai_client())
        settings = ModelSettings(max_tokens=48)
        desk = Agent(name="desk", model=chat, tools=[box_size], model_settings=settings, hooks=hooks)
        with suppress(AgentsException):  # the policy named a tool that there is not, or comes to no end
            await Runner.run(desk, question, max_turns=4, run_config=UNTRACED)
        return hooks.calls

    await trained(model, run)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_agents_at_urls_that_name_their_trajectories_are_trained(model: TrainableModel) -> None:
    url = (await model.api()).url

    async def run(rollout: Trajectory, question: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/t/{rollout.id}/v1", api_key=model.inference_api_key) as client:
            chat = OpenAIChatCompletionsModel(model.name, client)
            desk = Agent(name="desk", model=chat, tools=[box_size], model_settings=ModelSettings(max_tokens=48))
            with suppress(AgentsException):
                await Runner.run(desk, question, max_turns=4, run_config=UNTRACED)

    rollouts = [Trajectory(captured=True, reward=float(number)) for number in range(8)]
    await asyncio.gather(*map(run, rollouts, QUESTIONS))
    result = await model.train([TrajectoryGroup(rollouts)])
    assert result.applied and not result.warnings
    assert result.metrics["calls/trained"] >= 8 and result.metrics["calls/rendered_share"] == 0
