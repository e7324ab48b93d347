"""A captured trajectory shows what was said: its own conversation, and those of other agents beside it."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool

from offbook import TrainableModel, Trajectory, TrajectoryGroup
from offbook.testing import ScriptedServer
from offbook_langgraph import capture, trainable
from tests.langgraph_adapter.kinds.apps import add, asked, double, last, own_model

CONVERSATION = ["add(a=1, b=2)", "", "3", "the tools said 3"]


def texts(trajectory: Trajectory) -> list[str]:
    """What each message of the trajectory's own conversation says."""
    return [str(message.get("content") or "") for message in trajectory.messages()]


def test_the_trajectory_of_a_block_has_its_conversation(stand_in: TrainableModel, obedient: ScriptedServer) -> None:
    app = create_agent(own_model(), [add])
    with capture(stand_in) as trajectory:
        app.invoke(asked(CONVERSATION[0]))
    assert texts(trajectory) == CONVERSATION
    answer: Any = trajectory.messages()[1]
    assert answer["tool_calls"][0]["function"]["name"] == "add"
    assert [each["function"]["name"] for each in trajectory.tools or []] == ["add"]
    assert [ref.call_id for ref in trajectory.call_refs()] == [call.id for call in obedient.calls(trajectory.id)]


async def test_a_streamed_conversation_is_the_same(stand_in: TrainableModel) -> None:
    app = create_agent(own_model(), [add])
    async with capture(stand_in) as trajectory:
        assert [item async for item in app.astream(asked(CONVERSATION[0]), stream_mode="messages")]
    assert texts(trajectory) == CONVERSATION


def test_another_agents_conversation_is_beside_it(stand_in: TrainableModel) -> None:
    expert = create_agent(own_model(), [double], name="expert")

    @tool
    def ask_expert(order: str) -> str:
        """Ask the expert."""
        return last(expert.invoke(asked(order)))

    with capture(stand_in) as trajectory:
        create_agent(own_model(), [ask_expert], name="boss").invoke(asked("ask_expert(order='double(x=2)')"))
    assert texts(trajectory)[-1] == "the tools said the tools said 4"
    (beside,) = trajectory.additional_histories
    assert beside.messages()[-1].get("content") == "the tools said 4"


def test_calls_of_an_inner_capture_are_not_shown_by_the_outer_one(stand_in: TrainableModel) -> None:
    with capture(stand_in) as outer:
        own_model().invoke("one")
        with capture(stand_in) as inner:
            own_model().invoke("two")
    assert (texts(outer), outer.additional_histories) == (["one", "heard: one"], [])
    assert texts(inner) == ["two", "heard: two"]


def test_a_function_that_returns_a_reward_shows_its_conversation_to_a_judge(stand_in: TrainableModel) -> None:
    seen: list[list[str]] = []

    @trainable(model=stand_in)
    async def agent(scenario: dict[str, Any]) -> float:
        await own_model().ainvoke(scenario["question"])
        return 1.0

    async def judge(group: Any) -> Any:
        seen.extend(texts(each) for each in group)
        return group

    asyncio.run(agent.aevaluate([{"question": "hi"}], judge=judge))
    assert seen == [["hi", "heard: hi"]]


def test_messages_that_the_user_wrote_stay(stand_in: TrainableModel) -> None:
    mine = Trajectory(messages_and_choices=[{"role": "user", "content": "mine"}])
    with capture(stand_in, trajectory=mine):
        own_model().invoke("hi")
    assert texts(mine) == ["mine"]


def test_a_wrapped_graphs_state_is_shown_with_its_system_message_its_tools_and_other_agents(
    stand_in: TrainableModel,
) -> None:
    expert = create_agent(own_model(), [double], name="expert")

    @tool
    def ask_expert(order: str) -> str:
        """Ask the expert."""
        return last(expert.invoke(asked(order)))

    seen: list[Trajectory] = []

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        for trajectory in group:
            trajectory.reward = 1.0
        seen.extend(group)
        return group

    boss = create_agent(own_model(), [ask_expert], system_prompt="You are the boss.", name="boss")
    trainable(boss, model=stand_in, judge=judge).evaluate([{"question": "ask_expert(order='double(x=2)')"}])
    [trajectory] = seen
    assert [message["role"] for message in trajectory.messages()] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert trajectory.messages()[0].get("content") == "You are the boss."
    assert [each["function"]["name"] for each in trajectory.tools or []] == ["ask_expert"]
    (beside,) = trajectory.additional_histories
    assert beside.messages()[-1].get("content") == "the tools said 4"
