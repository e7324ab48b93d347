"""Judges inside a captured function: the policy never judges itself without a word."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

import offbook
from offbook import TrainableModel
from offbook.testing import ScriptedLlm, ScriptedServer, says, scripted_llm
from offbook_langgraph import capture, observe, trainable, uncaptured
from offbook_langgraph.calls.origins import _warned, warn_judge  # pyright: ignore[reportPrivateUsage]  # said once a process
from tests.langgraph_adapter.kinds.apps import asked, own_model

EVALUATOR = """
import asyncio

def create_judge(judge, schema):
    structured = judge.with_structured_output(schema)
    return lambda outputs: structured.invoke("correct? " + outputs)

def create_async_judge(judge, schema):
    structured = judge.with_structured_output(schema)

    async def ask(outputs):
        return await structured.ainvoke("correct? " + outputs)

    async def grade(outputs):
        [score] = await asyncio.gather(ask(outputs))
        return score

    return grade

def create_raw_judge(client):
    messages = [{"role": "user", "content": "correct?"}]
    return lambda: client.chat.completions.create(model="judge", messages=messages).choices[0].message.content

def create_custom_judge(function):
    return lambda outputs: function("correct? " + outputs)

def run_simulation(app, user):
    return app(user.invoke("what do you ask?").text)
"""
"""How evaluation packages call their models."""


class Score(BaseModel):
    """A judge's verdict."""

    score: float


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    _warned.clear()
    warn_judge.cache_clear()


@pytest.fixture
def paid() -> Iterator[ScriptedLlm]:
    """The paid model of the judge, which says no."""
    with scripted_llm(lambda request: says(json.dumps({"score": 0.0}))) as running:
        yield running


def judge_model(paid: ScriptedLlm, **options: Any) -> ChatOpenAI:
    return own_model(**{"model": "gpt-judge", "base_url": paid.url} | options)


def package(name: str) -> Any:
    """An installed evaluation package of that name."""
    module: dict[str, Any] = {"__name__": name}
    exec(compile(EVALUATOR, f"/venv/lib/site-packages/{name.replace('.', '/')}.py", "exec"), module)
    return SimpleNamespace(**module)


PACKAGES = (
    "openevals.llm",
    "agentevals.trajectory.llm",
    "langchain_classic.evaluation.criteria.eval_chain",
    "langsmith.evaluation.llm_evaluator",
    "deepeval.metrics.g_eval.g_eval",
    "ragas.metrics._faithfulness",
    "mlflow.genai.judges.instructions_judge",
)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_judge_of_an_evaluation_package_is_its_own_model(
    stand_in: TrainableModel, obedient: ScriptedServer, paid: ScriptedLlm, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    grade = package(name).create_judge(judge_model(paid), Score)

    @trainable(model=stand_in)
    async def agent(scenario: dict[str, str]) -> float:
        answer = (await own_model().ainvoke(scenario["question"])).text
        return grade(answer).score

    evaluation = agent.evaluate([{"question": "hi"}, {"question": "ho"}])
    assert (evaluation.reward, len(paid.requests)) == (0.0, 2)
    asked_for = {request.body["messages"][0]["content"] for request in paid.requests}
    assert asked_for == {"correct? heard: hi", "correct? heard: ho"}
    assert caplog.text.count(f"calls of {name.partition('.')[0]} are a judge's") == 1
    assert "the trained model answers" not in caplog.text


async def test_an_async_judge_and_one_with_a_function_of_the_apps_are_their_own_models(
    stand_in: TrainableModel, obedient: ScriptedServer, paid: ScriptedLlm
) -> None:
    evals = package("openevals.llm")
    async with capture(stand_in) as trajectory:
        answer = (await own_model().ainvoke("hi")).text
        assert (await evals.create_async_judge(judge_model(paid), Score)(answer)).score == 0.0
        ask: Callable[[str], Any] = lambda text: judge_model(paid).invoke(text).text  # noqa: E731
        assert evals.create_custom_judge(ask)(answer) == '{"score": 0.0}'
        assert evals.create_raw_judge(openai.OpenAI(base_url=paid.url, api_key="unused"))() == '{"score": 0.0}'
    assert len(paid.requests) == 3
    assert len(list(obedient.calls(trajectory.id))) == trajectory.metrics["captured_calls"] == 1


def test_a_simulated_user_of_an_evaluation_package_is_its_own_model_and_the_app_is_the_policy(
    stand_in: TrainableModel, obedient: ScriptedServer, paid: ScriptedLlm
) -> None:
    simulate = package("openevals.simulators.multiturn").run_simulation
    with capture(stand_in) as trajectory:
        assert simulate(lambda text: own_model().invoke(text).text, judge_model(paid)) == 'heard: {"score": 0.0}'
    assert len(paid.requests) == len(list(obedient.calls(trajectory.id))) == 1


def test_an_observation_leaves_the_judge_out(paid: ScriptedLlm) -> None:
    with observe() as trajectory:
        judge_model(paid).invoke("hi")
        package("openevals.llm").create_judge(judge_model(paid), Score)("hi")
    assert trajectory.metrics["calls"] == 1


def graph(*nodes: tuple[str, Any]) -> Any:
    built = StateGraph(MessagesState)
    before = START
    for name, node in nodes:
        built = built.add_node(name, node).add_edge(before, name)
        before = name
    return built.compile()


def answering(**options: Any) -> Any:
    return lambda state: {"messages": [own_model(**options).invoke(state["messages"])]}


HERE = r"made at .*test_judges\.py:\d+ in "


@pytest.mark.parametrize("model", ["gpt-judge", "gpt-4.1-mini"])
def test_a_call_outside_every_node_is_told_with_its_line(
    stand_in: TrainableModel, paid: ScriptedLlm, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = graph(("model", answering()))

    def grade(text: str) -> float:
        return float("1" in judge_model(paid, model=model).invoke(f"correct? {text}").text)

    @trainable(model=stand_in)
    def agent(scenario: dict[str, str]) -> float:
        return grade(app.invoke(asked(scenario["question"]))["messages"][-1].text)

    agent.evaluate([{"question": "hi"}, {"question": "hi 1"}])
    [told] = [record.message for record in caplog.records if "unlike the app's others" in record.message]
    assert f"outside every graph node, model '{model}', kind 'ChatOpenAI', made at " in told
    assert "test_judges.py:" in told
    assert " in grade. " in told
    assert paid.requests == []


def test_a_call_of_another_model_in_a_function_without_a_graph_is_told(
    stand_in: TrainableModel, paid: ScriptedLlm, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with capture(stand_in):
            own_model().invoke("hi")
            own_model().invoke("hi again")
            judge_model(paid).invoke("correct?")
    [told] = [record.message for record in caplog.records]
    assert "1 call unlike the app's others in this rollout: model 'gpt-judge', kind 'ChatOpenAI', made at" in told


def test_a_call_of_another_model_in_a_tool_is_told(
    stand_in: TrainableModel, paid: ScriptedLlm, caplog: pytest.LogCaptureFixture
) -> None:
    def check(state: MessagesState) -> dict[str, Any]:
        return {"messages": [judge_model(paid).invoke("correct?")]}

    with capture(stand_in):
        graph(("a", answering()), ("b", answering()), ("check", check)).invoke(asked("hi"))
    [told] = [record.message for record in caplog.records]
    assert "node 'check', model 'gpt-judge'" in told


@pytest.mark.parametrize("option", ["select", "exclude", "outside", "reward", "one model"])
def test_what_the_app_has_said_is_not_told(
    stand_in: TrainableModel, paid: ScriptedLlm, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = graph(("model", answering()))
    options: dict[str, Any] = {
        "select": {"select": {"model": "gpt-*"}},
        "exclude": {"exclude": {"model": "gpt-judge"}},
        "reward": {"reward": lambda scenario, output: float("1" in judge_model(paid).invoke("correct?").text)},
    }.get(option, {})

    @trainable(model=stand_in, **options)
    def agent(scenario: dict[str, str]) -> float:
        app.invoke(asked("hi"))
        if option == "outside":
            with offbook.outside():
                return float("1" in judge_model(paid).invoke("correct?").text)
        return float("1" in judge_model(paid).invoke("correct?").text) if option in ("select", "exclude") else 0.5

    agent.evaluate([{"question": "hi"}])
    assert len(paid.requests) == (option in ("exclude", "outside", "reward"))
    assert "unlike the app's others" not in caplog.text


async def test_outside_holds_for_tasks_threads_and_executors_and_for_blocks_inside(
    stand_in: TrainableModel, obedient: ScriptedServer, paid: ScriptedLlm
) -> None:
    async def in_a_task() -> None:
        await judge_model(paid).ainvoke("correct?")

    for scope in ("context", "process"):
        async with capture(stand_in, scope=scope) as trajectory:  # type: ignore[arg-type]
            with offbook.outside(), ThreadPoolExecutor(1) as pool:
                judge_model(paid).invoke("correct?")
                await asyncio.create_task(in_a_task())
                await asyncio.to_thread(judge_model(paid).invoke, "correct?")
                pool.submit(judge_model(paid).invoke, "correct?").result()
                thread = threading.Thread(target=judge_model(paid).invoke, args=("correct?",))
                thread.start()
                thread.join()
                with offbook.outside():
                    judge_model(paid).invoke("correct?")
                judge_model(paid).invoke("correct?")
                openai.OpenAI(base_url=paid.url, api_key="unused").chat.completions.create(
                    model="judge", messages=[{"role": "user", "content": "correct?"}]
                )
            assert own_model().invoke("hi").text == "heard: hi"
        assert len(list(obedient.calls(trajectory.id))) == 1
    assert len(paid.requests) == 16


def test_inside_outside_the_rollout_is_still_there_and_a_capture_captures(
    stand_in: TrainableModel, obedient: ScriptedServer, paid: ScriptedLlm
) -> None:
    with capture(stand_in) as trajectory, uncaptured():
        assert offbook.current_trajectory() is trajectory
        offbook.log_reward(0.25)
        offbook.log_metric("turns", 3)
        with capture(stand_in) as other:
            assert own_model().invoke("hi").text == "heard: hi"
        judge_model(paid).invoke("correct?")
    assert (trajectory.reward, trajectory.metrics["turns"]) == (0.25, 3)
    assert [len(list(obedient.calls(each.id))) for each in (trajectory, other)] == [0, 1]
    assert len(paid.requests) == 1


async def test_outside_an_explicit_client_belongs_to_no_rollout(
    stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    async with capture(stand_in) as trajectory:
        with offbook.outside():
            answer = await stand_in.openai_client().chat.completions.create(
                model=stand_in.name, messages=[{"role": "user", "content": "correct?"}]
            )
    assert answer.choices[0].message.content == "heard: correct?"
    assert list(obedient.calls(trajectory.id)) == []


def test_a_trained_app_answers_inside_outside(stand_in: TrainableModel, obedient: ScriptedServer) -> None:
    @trainable(model=stand_in)
    def helper(text: str) -> str:
        return str(own_model().invoke(text).text)

    with capture(stand_in) as trajectory, offbook.outside():
        assert helper.trained()("hi") == "heard: hi"
    assert list(obedient.calls(trajectory.id)) == []


def test_a_tool_with_a_judge_of_an_evaluation_package_reaches_the_judge(
    stand_in: TrainableModel, paid: ScriptedLlm
) -> None:
    grade = package("openevals.llm").create_judge(judge_model(paid), Score)

    @tool
    def check(text: str) -> float:
        """Check a text."""
        return grade(text).score

    with capture(stand_in):
        assert check.invoke({"text": "hi"}) == 0.0
    assert len(paid.requests) == 1
