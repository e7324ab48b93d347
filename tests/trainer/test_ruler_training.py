"""Training by RULER, with the real server and a scripted judge over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

import offbook
from offbook.base.errors import RolloutError
from offbook.base.types import new_id
from offbook.base.wire import TrajectoryQuery
from offbook.quickstart.desk import Desk
from offbook.testing import LlmReply, LlmRequest, ShownConversation, attempts_shown, says, scripted_llm
from offbook.trainer.report import Stopped
from offbook_langgraph import trainable
from tests.rewards.scripted_judge import entries, judge_at, verdict

SCENARIOS = [{"id": str(number), "prompt": f"say the word {word}"} for number, word in enumerate(("blue", "teal"))]
SMALL: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 2, "config": offbook.TrainConfig(learning_rate=1e-3)}


async def rollout(model: offbook.TrainableModel, scenario: dict[str, str]) -> offbook.Trajectory:
    """One call, and no reward."""
    trajectory = offbook.Trajectory(messages_and_choices=[{"role": "user", "content": scenario["prompt"]}])
    answer = await model.openai_client().chat.completions.create(
        model=model.name, messages=trajectory.messages(), max_tokens=8
    )
    trajectory.messages_and_choices.append(answer.choices[0])
    return trajectory


def varied(conversations: list[ShownConversation]) -> float:
    """From 0 to 1, another for another text."""
    text = json.dumps(conversations[0].messages)
    return (sum(map(ord, text)) % 97) / 96


def opinion(request: LlmRequest) -> LlmReply:
    return verdict(entries(request, varied))


async def test_a_trainer_trains_what_the_judge_prefers(model: offbook.TrainableModel) -> None:
    with scripted_llm(opinion) as endpoint:
        trainer = offbook.Trainer(model, rollout, SCENARIOS, eval=SCENARIOS, judge=judge_at(endpoint), **SMALL)
        report = await trainer.atrain(1)
    assert report.stopped is Stopped.FINISHED and report.step == 1
    [iteration] = report.iterations
    assert iteration.metrics["judge/dropped"] == 0 and 0 < iteration.reward < 1
    assert iteration.metrics["llms/judge/questions"] == 2
    kept = await (await model.api()).trajectories(TrajectoryQuery(run=report.run, split="train"))
    records = kept.trajectories
    assert len(records) == 8
    for record in records:
        assert record.reward == record.metrics["ruler_score"] and record.logs[-1].startswith("RULER explanation: for ")


async def test_a_step_is_never_trained_on_a_half_scored_group(model: offbook.TrainableModel) -> None:
    def half(request: LlmRequest) -> LlmReply:
        scores = entries(request, varied)
        return verdict(scores[:-1] if "word blue" in request.messages[1]["content"] else scores)

    with scripted_llm(half) as endpoint:
        report = await offbook.Trainer(model, rollout, SCENARIOS, judge=judge_at(endpoint), **SMALL).atrain(1)
    [iteration] = report.iterations
    assert iteration.metrics["judge/dropped"] == 0.5
    kept = await (await model.api()).trajectories(TrajectoryQuery(run=report.run))
    scored = {record.place.scenario: record.reward is not None for record in kept.trajectories}
    assert scored == {"0": False, "1": True}
    assert iteration.metrics["groups/total"] == 2 and iteration.metrics["groups/dropped_too_few"] == 1


def test_a_wrapped_graph_is_judged_with_its_system_message_and_tools(
    model: offbook.TrainableModel, tmp_path: Path
) -> None:
    desk = Desk(tmp_path / "desk.db")
    llm = ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"), max_completion_tokens=24)
    agent = create_agent(llm, desk.tools(), system_prompt="You are the order desk.")
    with scripted_llm(opinion) as endpoint:
        app = trainable(agent, model=model, judge=judge_at(endpoint))
        report = app.train(desk.requests("train", 2), steps=1, **SMALL)
    assert report.step == 1
    for request in endpoint.requests:
        for shown in attempts_shown(request.messages).values():
            assert shown[0].messages[0] == {"role": "system", "content": "You are the order desk."}
            assert shown[0].messages[1]["role"] == "user" and len(shown[0].tools or []) == 5


APP = """
import offbook
from offbook_langgraph import trainable
from langchain_openai import ChatOpenAI

@trainable
async def agent(scenario):
    answer = await ChatOpenAI(model="gpt-4.1-mini", api_key="unused", max_completion_tokens=8).ainvoke(scenario["prompt"])
    return answer.text
"""


@pytest.mark.slow("whole trainings")
async def test_the_command_trains_by_a_judge(tmp_path: Path, local_backend: offbook.LocalBackend) -> None:
    api = await local_backend.connect("tiny")
    name = new_id("judged")
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "rubric.md").write_text("- Short is good.")
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(scenario) + "\n" for scenario in SCENARIOS))
    with scripted_llm(opinion) as endpoint:
        words = (
            f"train app:agent --scenarios words.jsonl --steps 1 --group-size 4 --scenarios-per-step 2 --judge openai/judge "
            f"--judge-api-base {endpoint.url} --rubric rubric.md --model {name} --base-model tiny"
        )
        environment = {"OPENAI_API_KEY": "k", "OFFBOOK_URL": api.url, "OFFBOOK_API_KEY": api.key or ""}
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "offbook", *words.split()],
            cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "judge: 2 questions" in done.stdout
    assert "- Short is good." in endpoint.requests[0].messages[0]["content"]


async def test_a_judge_that_answers_no_group_ends_the_run_with_the_reason(model: offbook.TrainableModel) -> None:
    with scripted_llm([says("I will not.")]) as endpoint:
        trainer = offbook.Trainer(model, rollout, SCENARIOS, judge=judge_at(endpoint), **SMALL)
        with pytest.raises(RolloutError, match=r"8 x the judge failed: LlmError: "):
            await trainer.atrain(1)
