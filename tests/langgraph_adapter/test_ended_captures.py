"""A capture that has ended: what a rollout leaves behind is told so, and blocks may end in any order."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from offbook import TrainableModel
from offbook.base.errors import CaptureError, ConfigError, RolloutError
from offbook.testing import ScriptedLlm, ScriptedServer, says, scripted_llm
from offbook_langgraph import capture, observe, trainable


@pytest.fixture
def own() -> Iterator[ChatOpenAI]:
    with scripted_llm([says("mine")]) as running:
        yield made(running)


def made(server: ScriptedLlm) -> ChatOpenAI:
    return ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url=server.url, max_retries=0)


async def test_a_task_that_outlives_its_rollout_makes_no_more_calls(
    stand_in: TrainableModel, obedient: ScriptedServer, own: ChatOpenAI
) -> None:
    over = asyncio.Event()

    async def left_behind() -> str:
        await over.wait()
        return (await own.ainvoke("late")).text

    async with capture(stand_in) as trajectory:
        task = asyncio.create_task(left_behind())
        await own.ainvoke("hi")
    over.set()
    with pytest.raises(CaptureError, match=rf"the rollout {trajectory.id} .* has ended"):
        await task
    assert len(obedient.calls(trajectory.id)) == 1
    assert (await own.ainvoke("hi")).text == "mine"


def test_a_worker_that_a_rollout_started_does_not_take_the_next_rollouts_calls(
    stand_in: TrainableModel, obedient: ScriptedServer, own: ChatOpenAI
) -> None:
    asked: queue.Queue[str | None] = queue.Queue()
    answers: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        while (text := asked.get()) is not None:
            try:
                answers.put(own.invoke(text).text)
            except CaptureError as error:
                answers.put(error)

    thread = threading.Thread(target=work, daemon=True)
    with capture(stand_in) as first:
        thread.start()
        asked.put("one")
        assert answers.get(timeout=30) == "heard: one"
    with capture(stand_in) as second:
        asked.put("two")
        assert "has ended" in str(answers.get(timeout=30))
    asked.put(None)
    thread.join(30)
    assert [len(obedient.calls(each.id)) for each in (first, second)] == [1, 0]


def test_blocks_inside_generators_may_end_in_any_order(
    stand_in: TrainableModel, obedient: ScriptedServer, own: ChatOpenAI
) -> None:
    def opened() -> Generator[str]:
        with capture(stand_in) as trajectory:
            yield trajectory.id

    first, second = opened(), opened()
    next(first)
    next(second)
    first.close()
    second.close()
    assert own.invoke("hi").text == "mine"


def test_one_capture_or_observation_is_for_one_block(stand_in: TrainableModel) -> None:
    for used in (capture(stand_in), observe()):
        with used, pytest.raises(ConfigError, match=r"was used before: make one for each"):
            used.__enter__()
        with pytest.raises(ConfigError, match="was used before"):
            used.__enter__()


def test_a_selection_that_raises_is_no_silence(stand_in: TrainableModel, own: ChatOpenAI) -> None:
    named = pytest.raises(CaptureError, match=r"failed on a call of ChatOpenAI, so it has no target: KeyError: 'x'")
    with named, capture(stand_in, select=lambda origin: {}["x"]):
        try:
            own.invoke("hi")
        except RuntimeError:
            swallowed = True
        assert swallowed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_is_refused(stand_in: TrainableModel, own: ChatOpenAI) -> None:
    context = multiprocessing.get_context("fork")
    told: Any = context.Queue()

    def child() -> None:
        try:
            told.put(own.invoke("hi").text)
        except CaptureError as error:
            told.put(str(error))

    with capture(stand_in):
        own.invoke("hi")
        process = context.Process(target=child)
        process.start()
        assert "a forked process cannot share its parent's capture" in told.get(timeout=30)
        process.join(30)


def test_an_evaluation_in_which_nothing_is_selected_is_none(stand_in: TrainableModel, own: ChatOpenAI) -> None:
    @trainable(model=stand_in, select={"node": "wrok"})
    def agent(scenario: dict[str, str]) -> float:
        return float(own.invoke(scenario["question"]).text == "mine")

    with pytest.raises(
        RolloutError,
        match=r"no call went to the policy(.|\n)*1 x model 'own', kind 'ChatOpenAI' -> the app's own model",
    ):
        agent.evaluate([{"question": "hi"}])


def test_the_trained_app_is_not_trained_itself(stand_in: TrainableModel, own: ChatOpenAI) -> None:
    served = trainable(own, model=stand_in, reward=lambda scenario, output: 1.0).trained()
    with pytest.raises(ConfigError, match=r"this is a trained\(\) app"):
        served.evaluate(["hi"])


def test_a_failing_reward_is_named_with_its_line(stand_in: TrainableModel, own: ChatOpenAI) -> None:
    def reward(scenario: Any, output: Any) -> float:
        return {}["missing"]

    with pytest.raises(RolloutError, match=r"KeyError: 'missing' at test_ended_captures\.py:\d+"):
        trainable(own, model=stand_in, reward=reward).evaluate(["hi"])
