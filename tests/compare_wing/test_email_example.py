"""The e-mail example, tiny form: a trained step and scripted "big models" over HTTP answer the same graph."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from langgraph_email_agent.agent import make_agent
from langgraph_email_agent.big_models import reader
from langgraph_email_agent.inbox import Inbox, make_mail
from langgraph_email_agent.questions import Question, make_questions
from langgraph_email_agent.questions import reward as reward_of

import offbook
import offbook_compare
from offbook.base.errors import (
    BudgetExceeded,
    ConfigError,
    LlmError,
    RolloutError,
)
from offbook.base.types import new_id
from offbook.base.wire import TrajectoryQuery
from offbook.commands.main import run
from offbook.testing import LlmReply, LlmRequest, fails, says, scripted_llm
from offbook.trainer.evaluate import Interval
from offbook_compare.journal import ComparedRollout
from offbook_langgraph import trainable
from offbook_langgraph.training.trainable import TrainableRunnable

PRICED = "&prompt_price=2&completion_price=8"


@pytest.fixture
def held_out() -> list[Question]:
    return make_questions(make_mail(brief=True), 6, held_out=True, brief=True)


def make_app(model: offbook.TrainableModel | None = None, **options: Any) -> TrainableRunnable:
    agent = make_agent(Inbox(make_mail(brief=True)), 64)
    given: dict[str, Any] = {"model": model, "reward": reward_of, **options}
    return trainable(agent, **given)


def rows_of(folder: Path) -> list[ComparedRollout]:
    return [ComparedRollout.model_validate_json(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app's own model is never asked."""
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9")


@pytest.mark.slow("whole comparisons with a policy")
async def test_a_step_and_big_models_answer_the_same_graph(
    local_backend: offbook.LocalBackend, held_out: list[Question], tmp_path: Path
) -> None:
    model = offbook.TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)
    app = make_app(model)
    with scripted_llm(reader(100)) as able, scripted_llm(reader(0)) as unable:
        candidates = [
            f"openai/big?name=able&api_base={able.url}{PRICED}",
            f"openai/big?name=unable&api_base={unable.url}",
            "step:0",
        ]
        found = await offbook_compare.acompare(app, held_out, candidates, output=tmp_path, gpu_price=2.0)
        asked = len(able.requests)
        again = await offbook_compare.acompare(app, held_out, candidates, output=tmp_path, gpu_price=2.0)
    assert [each.name for each in found.candidates] == ["able", "unable", "step:0"]
    able_result, unable_result, step = found.candidates
    assert (found.measure, able_result.value and able_result.value.mean) == ("success", 1.0)
    assert unable_result.value is not None and unable_result.value.mean == 0.0
    assert unable_result.difference is not None and unable_result.difference.high < 0
    assert (able_result.calls, able_result.failed, able_result.rollouts) == (3.0, 0, 6)
    assert able_result.cost is not None and able_result.cost > 0
    assert unable_result.cost is None
    assert step.cost is not None and step.calls >= 1
    assert (asked, len(able.requests)) == (18, 18)  # nothing was run again
    assert [each.value for each in again.candidates] == [each.value for each in found.candidates]
    await _records_have_them(model, found.run, able_result.name)
    files = sorted(each.name for each in tmp_path.iterdir())
    assert files == ["comparison.json", "report.md", "rollouts.jsonl"]
    report = (tmp_path / "report.md").read_text()
    assert "| able | 1.000 (0.541 to 1.000) | baseline |" in report
    assert "unable: its price is unknown" in report


async def _records_have_them(model: offbook.TrainableModel, run: str, name: str) -> None:
    api = await model.api()
    page = await api.trajectories(TrajectoryQuery(model=name, run=f"{name}-{run}", split="compare"))
    assert len(page.trajectories) == 6
    record = page.trajectories[0]
    assert (record.reward, record.metrics["calls"], record.metrics["success"]) == (1.0, 3.0, 1.0)
    assert record.metrics["cost"] > 0
    said = record.histories[0].messages
    assert [message["role"] for message in said][-5:] == ["assistant", "tool", "assistant", "tool", "assistant"]
    logs = await api.logs(name)
    assert logs[-1].metrics["compare/success"] == 1.0
    own = await api.trajectories(TrajectoryQuery(model=model.name, run=f"step-0-{run}", split="compare"))
    assert len(own.trajectories) == 6 and own.trajectories[0].place.step == 0


async def test_an_app_without_a_model_is_compared_without_a_server(held_out: list[Question], tmp_path: Path) -> None:
    with scripted_llm(reader(100)) as able, scripted_llm(reader(50)) as half:
        given = [f"openai/big?name=able&api_base={able.url}", f"openai/big?name=half&api_base={half.url}"]
        found = await offbook_compare.acompare(
            make_app(), held_out, given, output=tmp_path, rollouts=2, baseline="half"
        )
        with pytest.raises(ConfigError, match="wrapped without a model"):
            await offbook_compare.acompare(make_app(), held_out, ["step:0"], output=tmp_path)
        with pytest.raises(ConfigError, match="is not a candidate"):
            await offbook_compare.acompare(make_app(), held_out, given, output=tmp_path, baseline="other")
    assert (found.baseline, found.of("able").passes) == ("half", {1: 1.0, 2: 1.0})
    difference = found.of("able").difference
    assert difference is not None and 0 < difference.mean <= 1
    assert {sample.values["able"] for sample in found.samples} == {1.0}
    assert all(sample.answers["half"] == "I could not find that." for sample in found.samples)


async def test_when_the_money_is_spent_what_was_run_is_kept_and_a_second_run_goes_on(
    held_out: list[Question], tmp_path: Path
) -> None:
    with scripted_llm(reader(100)) as able:
        given = [f"openai/big?name=able&api_base={able.url}{PRICED}"]
        with pytest.raises(BudgetExceeded, match="max_cost"):
            await offbook_compare.acompare(make_app(), held_out, given, output=tmp_path, max_cost=0.004, concurrency=1)
        kept, asked = len(rows_of(tmp_path)), len(able.requests)
        found = await offbook_compare.acompare(make_app(), held_out, given, output=tmp_path, concurrency=1)
    assert 0 < kept < 6
    assert len(rows_of(tmp_path)) == 6
    assert len(able.requests) == asked + 3 * (6 - kept)
    assert found.of("able").value is not None and found.of("able").value.mean == 1.0  # type: ignore[union-attr]


async def test_a_failed_rollout_is_no_zero_and_is_run_again(held_out: list[Question], tmp_path: Path) -> None:
    broken = [True]

    def sometimes(request: LlmRequest) -> LlmReply:
        if broken[0] and held_out[0].question in str(request.messages):
            return fails(400, "this one not")
        return reader(100)(request)

    with scripted_llm(sometimes) as api:
        given = [f"openai/big?name=able&api_base={api.url}"]
        first = await offbook_compare.acompare(make_app(), held_out, given, output=tmp_path)
        broken[0] = False
        second = await offbook_compare.acompare(make_app(), held_out, given, output=tmp_path)
    result = first.of("able")
    assert (result.failed, result.value and result.value.mean) == (1, 1.0)
    assert any("1 of 6 rollouts failed" in line for line in first.warnings)
    assert (second.of("able").failed, len(rows_of(tmp_path))) == (0, 7)


async def test_an_account_that_takes_no_calls_ends_the_comparison(held_out: list[Question], tmp_path: Path) -> None:
    with scripted_llm([fails(401, "who are you?")]) as api, pytest.raises(LlmError, match="who are you"):
        await offbook_compare.acompare(make_app(), held_out, [f"openai/big?api_base={api.url}"], output=tmp_path)
    assert not (tmp_path / "rollouts.jsonl").exists()


async def test_a_candidate_that_was_never_called_is_an_error(held_out: list[Question], tmp_path: Path) -> None:
    with scripted_llm(reader(100)) as own, scripted_llm(reader(100)) as api, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_BASE", own.url)
        app = make_app(exclude={"node": "*"}, on_leak="ignore")
        with pytest.raises(RolloutError, match="made no call to it"):
            await offbook_compare.acompare(app, held_out, [f"openai/big?api_base={api.url}"], output=tmp_path)
    assert api.requests == [] and own.requests != []


async def test_a_judge_compares_rollouts_without_rewards(held_out: list[Question], tmp_path: Path) -> None:
    async def judge(group: offbook.TrajectoryGroup) -> offbook.TrajectoryGroup:
        for each in group:
            each.reward = float("could not" not in str(each.messages()[-1].get("content")))
        return group

    app = make_app(reward=None, judge=judge)
    with scripted_llm(reader(100)) as able, scripted_llm(reader(0)) as unable:
        given = [f"openai/big?name=unable&api_base={unable.url}", f"openai/big?name=able&api_base={able.url}"]
        found = await offbook_compare.acompare(app, held_out, given, output=tmp_path)
    [rate] = found.win_rates
    assert (rate.candidate, rate.against, rate.rate.mean, found.measure) == ("able", "unable", 1.0, "judge's score")
    assert found.of("able").difference == Interval(1.0, 1.0, 1.0)
    assert "## What does the judge prefer?" in (tmp_path / "report.md").read_text()


async def test_a_rollout_function_is_compared_too(tmp_path: Path) -> None:
    async def rollout(model: offbook.Model[Any], scenario: dict[str, str]) -> offbook.Trajectory:
        messages = [{"role": "user", "content": scenario["question"]}]
        answer = await model.openai_client().chat.completions.create(
            model=model.inference_name(),
            messages=messages,  # type: ignore[arg-type]
        )
        said = answer.choices[0]
        return offbook.Trajectory(
            messages_and_choices=[*messages, said], reward=float(said.message.content == scenario["answer"])
        )

    def echo(request: LlmRequest) -> LlmReply:
        return says(request.messages[-1]["content"])

    scenarios = [{"id": str(at), "question": f"q{at}", "answer": f"q{at % 2}"} for at in range(4)]
    with scripted_llm(echo) as api:
        model = offbook.Model("echo", inference_base_url=api.url, inference_api_key="key")
        found = await offbook_compare.acompare(rollout, scenarios, [model], output=tmp_path, success_at=1.0)
    result = found.of("echo")
    assert (found.measure, result.value and result.value.mean, result.calls) == ("success", 0.5, 1.0)
    said = {
        row.scenario: [message.get("content") for message in row.trajectory.messages()] for row in rows_of(tmp_path)
    }
    assert said == {str(at): [f"q{at}", f"q{at}"] for at in range(4)}


APP = """
from langgraph_email_agent.agent import make_agent
from langgraph_email_agent.inbox import Inbox, make_mail
from langgraph_email_agent.questions import reward
from offbook_langgraph import trainable

agent = trainable(make_agent(Inbox(make_mail(brief=True)), 64), reward=reward)
"""


def test_the_command_prints_the_results_and_writes_the_report(
    held_out: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compared_app.py").write_text(APP)
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(asdict(each)) + "\n" for each in held_out))
    with scripted_llm(reader(100)) as able, scripted_llm(reader(0)) as unable:
        words = ["compare", "compared_app:agent", "--scenarios", "held_out.jsonl", "--trained-on", "held_out.jsonl"]
        words += ["--with", f"openai/big?name=able&api_base={able.url}{PRICED}"]
        words += ["--with", f"openai/big?name=unable&api_base={unable.url}{PRICED}"]
        assert run(words) == 0
    printed = capsys.readouterr().out
    assert "able: success 1.000 (0.541 to 1.000)" in printed
    assert "difference to able -1.000 (-1.000 to -1.000)" in printed
    assert "note: 6 of 6 scenarios are training scenarios" in printed
    assert (tmp_path / "comparison" / "report.md").exists()
    assert run([*words[:2], "--scenarios", "held_out.jsonl", "--with", "step:x"]) == 2
