"""Comparisons of apps that are not one graph with one model, and what a user can get wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

import offbook
import offbook_compare
from offbook.base.errors import ConfigError
from offbook.base.types import RolloutPlace, new_id
from offbook.base.wire import TrajectoryQuery
from offbook.commands.main import run
from offbook.testing import (
    LlmReply,
    LlmRequest,
    ScriptedLlm,
    ScriptedServer,
    fails,
    says,
    scripted_llm,
    scripted_server,
)
from offbook_compare.contamination import trained_ids
from offbook_langgraph import trainable
from tests.fakes.obedient_policy import obey

SCENARIOS = [{"id": word, "question": f"say {word}"} for word in ("blue", "teal", "gold")]
APP = """
from langchain_openai import ChatOpenAI
from offbook_langgraph import trainable


@trainable
async def agent(scenario):
    answer = await ChatOpenAI(model="gpt-4.1", max_retries=0).ainvoke(scenario["question"])
    return float(scenario["id"] in answer.text)
"""


def echo(request: LlmRequest) -> LlmReply:
    return says(f"heard: {request.messages[-1]['content']}")


@pytest.fixture(scope="module")
def obedient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(obey, tmp_path_factory.mktemp("obedient")) as running:
        yield running


def own_model(served: ScriptedServer) -> offbook.TrainableModel:
    return offbook.TrainableModel(name=new_id("agent"), base_model="tiny", backend=offbook.RemoteBackend(served.url))


@pytest.fixture
def folder(app_folder: Path) -> Path:
    (app_folder / "said_app.py").write_text(APP)
    (app_folder / "held_out.jsonl").write_text("".join(json.dumps(each) + "\n" for each in SCENARIOS))
    return app_folder


def given(api: ScriptedLlm, options: str = "") -> list[str]:
    return [f"openai/big?name=big&api_base={api.url}{options}"]


# ---- several models, threads, retries


async def test_of_an_app_with_several_models_a_candidate_answers_for_all(
    obedient: ScriptedServer, folder: Path
) -> None:
    planner, writer = own_model(obedient), own_model(obedient)

    async def team(scenario: dict[str, str]) -> float:
        plan = await ChatOpenAI(model="gpt-plan").ainvoke(scenario["question"])
        answer = await ChatOpenAI(model="gpt-write").ainvoke(plan.text)
        return float(scenario["id"] in answer.text)

    app = trainable(team, model={planner: {"model": "gpt-plan"}, writer: {"model": "gpt-write"}})
    with scripted_llm(echo) as api:
        found = await offbook_compare.acompare(app, SCENARIOS, ["step:0", *given(api)], output=folder / "out")
        asked = [request.messages[-1]["content"] for request in api.requests]
    assert [(each.name, each.calls, each.reward) for each in found.candidates] == [("step:0", 2, 1), ("big", 2, 1)]
    assert sorted(asked) == sorted(f"{said}say {each['id']}" for each in SCENARIOS for said in ("", "heard: "))
    page = await (await planner.api()).trajectories(TrajectoryQuery(run=f"step-0-{found.run}", split="compare"))
    assert len(page.trajectories) == len(SCENARIOS)
    for record in page.trajectories:  # each model answered its own call
        assert [call.model for call in obedient.calls(record.id)] == [planner.name, writer.name]
    with pytest.raises(ConfigError, match=f"{planner.name!r} has no step 4; there are 0"):
        await offbook_compare.acompare(app, SCENARIOS, ["step:4"], output=folder / "out")


async def test_an_app_that_calls_from_older_threads_runs_one_rollout_at_a_time(folder: Path) -> None:
    jobs: list[Any] = []
    ready, over = threading.Semaphore(0), threading.Event()

    def work() -> None:  # begun before any capture: only scope="process" sees its calls
        while ready.acquire() and not over.is_set():
            question, done = jobs.pop()
            done.append(ChatOpenAI(model="gpt-4.1").invoke(question).text)
            done[0].set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def agent(scenario: dict[str, str]) -> float:
        done: list[Any] = [threading.Event()]
        jobs.append((scenario["question"], done))
        ready.release()
        assert done[0].wait(60)
        return float(scenario["id"] in done[1])

    app = trainable(agent, scope="process")
    with scripted_llm(echo) as api:
        found = await offbook_compare.acompare(app, SCENARIOS, given(api), output=folder / "out")
        with pytest.raises(ConfigError, match="concurrency: the app runs 1 rollout at a time, got 4"):
            await offbook_compare.acompare(app, SCENARIOS, given(api), output=folder / "out", concurrency=4)
    over.set()
    ready.release()
    big = found.of("big")
    assert (big.calls, big.failed, big.reward) == (1, 0, 1.0)
    assert api.max_concurrency == 1


def test_a_call_that_fails_is_asked_again_and_the_rollout_does_not_know(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed: set[str] = set()

    def at_first(request: LlmRequest) -> LlmReply:
        question = request.messages[-1]["content"]
        if question in failed:
            return echo(request)
        failed.add(question)
        return fails(500, "on fire")

    with scripted_llm(at_first) as api:
        words = ["compare", "said_app:agent", "--scenarios", "held_out.jsonl", "--with", *given(api, "&retries=2")]
        assert run(words) == 0
        assert len(api.requests) == 2 * len(SCENARIOS)
    printed = capsys.readouterr().out
    assert "big: reward 1.000 (0.292 to 1.000)" in printed and "failed" not in printed


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_comparison_that_was_killed_goes_on_where_it_was(folder: Path) -> None:
    """Signal 9 while the last rollout runs: what had ended is in the folder, and only the last is run."""
    more, stuck = threading.Event(), threading.Event()

    def last_waits(request: LlmRequest) -> LlmReply:
        if request.messages[-1]["content"] == "say gold" and not more.is_set():
            stuck.set()
            return says("too late", until=more)
        return echo(request)

    with scripted_llm(last_waits) as api:
        words = [
            "compare",
            "said_app:agent",
            "--scenarios",
            "held_out.jsonl",
            "--concurrency",
            "1",
            "--with",
            *given(api),
        ]
        command = [sys.executable, "-m", "offbook", *words]
        with subprocess.Popen(command, cwd=folder, env=dict(os.environ), stderr=subprocess.DEVNULL) as process:
            assert stuck.wait(120)
            process.send_signal(signal.SIGKILL)
        more.set()
        kept = (folder / "comparison" / "rollouts.jsonl").read_text().splitlines()
        before = len(api.requests)
        assert run(words) == 0
        asked = [request.messages[-1]["content"] for request in api.requests[before:]]
    assert [json.loads(line)["scenario"] for line in kept] == ["blue", "teal"]
    assert asked == ["say gold"]
    assert json.loads((folder / "comparison" / "comparison.json").read_text())["candidates"][0]["rollouts"] == 3


# ---- what the records know


async def test_the_ids_of_scenarios_that_were_trained_on_are_read_from_the_records(obedient: ScriptedServer) -> None:
    model = own_model(obedient)
    groups = [
        offbook.TrajectoryGroup(
            [offbook.Trajectory(reward=1.0)], place=RolloutPlace(scenario=name, group=new_id("group"))
        )
        for name in ("blue", "teal")
    ]
    await model.log(groups, split="train", metrics={}, step=0)
    await model.log(
        [offbook.TrajectoryGroup([offbook.Trajectory(reward=1.0)], place=RolloutPlace(scenario="gold"))], split="val"
    )
    assert await trained_ids(await model.api(), [model.name]) == {"blue", "teal"}


# ---- what a user can get wrong


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--with", "openai/x", "--baseline", "y"], "baseline: 'y' is not a candidate; the candidates are openai/x"),
        (["--with", "nowhere/x"], "provider"),
        (["--with", "step:last"], "candidates: 'step:last' is not a step"),
        (["--with", "step:0"], "candidates: step:0: the app was wrapped without a model"),
        (["--with", "openai/x?prompt_price=cheap&completion_price=1"], "prices"),
        (["--with", "openai/x?prompt_price=1"], "prompt_price and completion_price are needed together"),
        (["--with", "openai/x?retries=-1"], "retries"),
        (["--with", "openai/x", "--judge", "openai/j"], "candidates: a judge compares rollouts of at least two"),
        (["--with", "openai/x", "--rubric", "no.md"], "judge_api_base and rubric need --judge"),
        (["--with", "openai/x", "--scenarios", "empty.jsonl"], "scenarios: empty.jsonl holds no scenario"),
        (["--with", "openai/x", "--scenarios", "nofile.jsonl"], "scenarios: nofile.jsonl cannot be read"),
        (["--with", "openai/x", "--trained-on", "empty.jsonl"], "scenarios: empty.jsonl holds no scenario"),
        (["--with", "openai/x", "--model", "agent"], "--model needs --base-model too"),
        (["--with", "openai/x?api_base=http://127.0.0.1:9/v1", "--max-cost", "1"], "price"),
    ],
)
def test_what_cannot_be_compared_is_said_by_the_name_of_the_field(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.jsonl").write_text("")
    whole = ["compare", "said_app:agent", *words]
    whole += [] if "--scenarios" in words else ["--scenarios", "held_out.jsonl"]
    assert run(whole) in (1, 2)
    assert said in capsys.readouterr().err
