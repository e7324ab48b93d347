"""Agents of Pydantic AI."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput, capture_run_messages
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from offbook import TrainableModel
from offbook.base.types import new_id
from offbook.testing import ScriptedServer

from .rollouts import client_for, one_branch, recorded, trained


class City(BaseModel):
    """A city."""

    city: str
    size: int


TEAL = City(city="teal", size=7)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def box_size(box: str) -> str:
    """The size of a box."""
    return box[::-1]


def chat(client: Any, name: str = "default") -> OpenAIChatModel:
    """Pydantic AI's model on a client."""
    return OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))


def responses(client: Any, name: str = "default") -> OpenAIResponsesModel:
    """Its model of the Responses API."""
    return OpenAIResponsesModel(name, provider=OpenAIProvider(openai_client=client))


@pytest.mark.parametrize("model_of", [chat, responses])
async def test_an_agent_calls_tools(served: ScriptedServer, model_of: Any) -> None:
    rollout = new_id("traj")
    async with client_for(served, rollout) as client:
        desk = Agent(model_of(client), instructions="Be brief.", tools=[add])
        run = await desk.run("add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)")
    assert run.output == "the tools said 3, 7, 11"
    assert one_branch(recorded(served, rollout, 3))


@pytest.mark.parametrize("model_of", [chat, responses])
async def test_a_streamed_agent_calls_tools(served: ScriptedServer, model_of: Any) -> None:
    rollout = new_id("traj")
    async with (
        client_for(served, rollout) as client,
        Agent(model_of(client), tools=[add]).run_stream("add(a=1, b=2)") as run,
    ):
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == "the tools said 3" and len(pieces) > 1
    assert one_branch(recorded(served, rollout, 2))


@pytest.mark.parametrize(
    ("output", "constrained"),
    [(ToolOutput, "tool_choice"), (NativeOutput, "response_format"), (PromptedOutput, "response_format")],
)
async def test_an_agent_ends_with_an_object(served: ScriptedServer, output: Any, constrained: str) -> None:
    rollout = new_id("traj")
    async with client_for(served, rollout) as client:
        run = await Agent(chat(client), tools=[add], output_type=output(City)).run(
            "add(a=1, b=2) then final_result(city='teal', size=7)"
        )
    assert run.output == TEAL
    calls = recorded(served, rollout, 2)
    assert one_branch(calls)
    assert [call.constrained for call in calls] == [constrained, constrained]


async def test_an_object_that_does_not_fit_is_asked_for_again(served: ScriptedServer) -> None:
    rollout = new_id("traj")
    order = "final_result(city='teal', size='large') then final_result(city='teal', size=7)"
    async with client_for(served, rollout) as client:
        assert (await Agent(chat(client), output_type=City).run(order)).output == TEAL
    assert one_branch(recorded(served, rollout, 2))


@pytest.mark.slow("whole trainings")
async def test_an_agent_is_trained_through_the_models_own_client(model: TrainableModel) -> None:
    async def run(question: str) -> int:
        desk = Agent(chat(model.openai_client(), model.name), tools=[box_size], model_settings={"max_tokens": 48})
        with capture_run_messages() as messages, suppress(UnexpectedModelBehavior):  # such as tools that there are not
            await desk.run(question)
        return sum(isinstance(message, ModelResponse) for message in messages)

    await trained(model, run)
