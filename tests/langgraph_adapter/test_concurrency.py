"""Many rollouts at once on one compiled graph: each call under its own trajectory, none lost, a branch per agent."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import StructuredTool, tool
from langgraph.graph import START, MessagesState, StateGraph

from offbook import RemoteBackend, TrainableModel, Trajectory
from offbook.base.types import Call, CallStatus
from offbook.client.rollouts.capture import histories_of
from offbook.testing import ScriptedServer, scripted_server
from offbook_langgraph import capture, trainable
from tests.fakes.obedient_policy import obey

from .kinds.apps import add, asked, double, last, own_model
from .kinds.policy import one_branch

ROLLOUTS = 200
EXPERT = create_agent(own_model(model="gpt-expert"), [double])


async def ask(order: str) -> str:
    return last(await EXPERT.ainvoke(asked(order)))


def ask_and_wait(order: str) -> str:
    return last(EXPERT.invoke(asked(order)))


ASK = StructuredTool.from_function(ask_and_wait, coroutine=ask, name="ask", description="Ask the expert.")


@tool
def ask_two(first: str, second: str) -> str:
    """Ask two experts, each in a thread."""
    with ThreadPoolExecutor(2) as pool:
        return " / ".join(pool.map(ask_and_wait, [first, second]))


APP = create_agent(own_model(), [add, ASK, ask_two])

CALLS = 2
"""Every agent calls its model for a tool, and again to answer."""
EXPERTS = "abc"
"""The sub-agents of a rollout, by the letter that their prompts carry; its own agent carries none."""


def plain_order(number: int) -> str:
    return f"[r{number}] add(a={number}, b=1) and add(a={number}, b=2)"


def plain_answer(number: int) -> str:
    return f"the tools said {number + 1}, {number + 2}"


def order_for_experts(number: int) -> str:
    """One sub-agent as a tool and two in a thread pool, all at once; each prompt with the mark of rollout and agent."""
    first, second, third = (f"[r{number}{letter}] double(x={number})" for letter in EXPERTS)
    return f"[r{number}] ask(order='{first}') and ask_two(first='{second}', second='{third}')"


def answer_of_experts(number: int) -> str:
    said = f"the tools said {2 * number}"
    return f"the tools said {said}, {said} / {said}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(obey, Path(tmp_path_factory.mktemp("gateway"))) as running:
        yield running


@pytest.fixture
def model(server: ScriptedServer) -> TrainableModel:
    return TrainableModel(name="policy", base_model="tiny", backend=RemoteBackend(server.url))


async def streamed(given: Any) -> str:
    """The last message's text, put together from the stream's pieces."""
    texts: dict[str | None, str] = {}
    async for chunk, _ in APP.astream(given, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk):
            texts[chunk.id] = texts.get(chunk.id, "") + chunk.text
    return [text for text in texts.values() if text][-1]


async def rollout(model: TrainableModel, number: int) -> tuple[int, str]:
    """Odd ones with sub-agents; of the others, half are streamed. The trajectory's id, once the answer is checked."""
    async with capture(model, trajectory=Trajectory()) as trajectory:
        if number % 2:
            assert last(await APP.ainvoke(asked(order_for_experts(number)))) == answer_of_experts(number)
        elif number % 4:
            assert last(await APP.ainvoke(asked(plain_order(number)))) == plain_answer(number)
        else:
            assert await streamed(asked(plain_order(number))) == plain_answer(number)
    return number, trajectory.id


def agents_of(calls: tuple[Call, ...], number: int) -> dict[str, list[Call]]:
    """The calls by the agent that made them, after a look that every mark in their prompts is the rollout's own."""
    found: dict[str, list[Call]] = {}
    for call in calls:
        marks = re.findall(r"\[r(\d+)([a-c]?)\]", json.dumps(call.messages))
        assert {mark for mark, _ in marks} == {str(number)}
        assert call.status == CallStatus.COMPLETE
        found.setdefault(marks[0][1], []).append(call)
    return found


def check_experts(calls: tuple[Call, ...], number: int) -> None:
    """Each agent's calls are one conversation, and one branch of tokens."""
    agents = agents_of(calls, number)
    assert {letter: len(made) for letter, made in agents.items()} == dict.fromkeys(["", *EXPERTS], CALLS)
    assert all(one_branch(made) for made in agents.values())
    histories = histories_of(list(calls))
    openings = [str(history.messages()[0].get("content")) for history in histories]
    assert sorted(re.findall(r"^\[r\d+([a-c]?)\]", opening)[0] for opening in openings) == ["", *EXPERTS]
    assert [len(history.call_refs()) for history in histories] == [CALLS] * len(histories)


def interleaved(calls: tuple[Call, ...], number: int) -> bool:
    """Whether calls of one sub-agent lie between those of another."""
    agent_of = {call.id: letter for letter, made in agents_of(calls, number).items() for call in made}
    turns = [agent_of[call.id] for call in sorted(calls, key=lambda call: call.started_at) if agent_of[call.id]]
    return sum(before != after for before, after in pairwise(turns)) >= len(EXPERTS)


@pytest.mark.slow("200 rollouts at once")
async def test_200_rollouts_at_once_keep_their_calls_apart(server: ScriptedServer, model: TrainableModel) -> None:
    before = len(server.sampler.received)
    owners = dict(await asyncio.gather(*(rollout(model, number) for number in range(ROLLOUTS))))
    made = {number: server.calls(trajectory_id) for number, trajectory_id in owners.items()}
    for number, calls in made.items():
        if number % 2:
            check_experts(calls, number)
        else:
            assert list(agents_of(calls, number)) == [""]
            assert one_branch(calls)
    expected = ROLLOUTS // 2 * CALLS + ROLLOUTS // 2 * CALLS * (1 + len(EXPERTS))
    assert sum(len(calls) for calls in made.values()) == len(server.sampler.received) - before == expected
    assert sum(interleaved(made[number], number) for number in owners if number % 2) > ROLLOUTS // 4


def test_sync_rollouts_in_threads_keep_their_calls_apart(server: ScriptedServer, model: TrainableModel) -> None:
    def run(number: int) -> str:
        with capture(model) as trajectory:
            assert last(APP.invoke(asked(order_for_experts(number)))) == answer_of_experts(number)
        return trajectory.id

    with ThreadPoolExecutor(16) as pool:
        owners = list(pool.map(run, range(16)))
    for number, trajectory_id in enumerate(owners):
        check_experts(server.calls(trajectory_id), number)


def test_sync_nodes_of_all_rollouts_run_at_once(model: TrainableModel) -> None:
    """LangGraph runs a sync node in the loop's pool. asyncio's own has four more threads than the machine has cores."""
    rollouts = 32  # as many as an evaluation runs at once
    all_there = threading.Barrier(rollouts, timeout=30)

    def node(state: MessagesState) -> Any:
        all_there.wait()
        return {"messages": [own_model().invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node(node).add_edge(START, "node").compile()
    app = trainable(graph, model=model, reward=lambda scenario, state: 1.0)
    result = app.evaluate([f"size(city='{number}')" for number in range(rollouts)])
    assert not result.failed, result
