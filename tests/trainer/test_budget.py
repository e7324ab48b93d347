"""A run that asks other LLMs: what it reports of their cost, and how it ends when the money is spent. The judge is asked over
real HTTP; the training server is scripted."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel
from rich.console import Console

from offbook import TrainableModel, TrainConfig, Trainer, Trajectory, TrajectoryGroup
from offbook.base.errors import (
    BudgetExceeded,
    ConfigError,
    LlmError,
    TrainError,
)
from offbook.contracts import StepFinished, TraceSink
from offbook.llms import Llm
from offbook.testing import LlmReply, ScriptedLlm, fails, refuses, says, scripted_llm
from offbook.trainer.judging import judged
from offbook.trainer.progress import PlainProgress
from offbook.trainer.report import Stopped, TrainReport
from tests.fakes.scripted_training import ScriptedTraining, scripted_training

SCENARIOS = [{"id": "train"}]
PRICES = {"prompt": 0, "completion": 200_000}
"""An answer of 5 tokens costs 1 USD."""
QUESTIONS = itertools.count()


class Scale(BaseModel):
    scale: float


class ScriptedJudge:
    """Asks one question per group, each another; the rewards are the places in the group times the answer."""

    def __init__(self, endpoint: ScriptedLlm, **options: Any) -> None:
        self.llm = Llm("openai/judge", **{"api_base": endpoint.url, "cache": None, "prices": PRICES, **options})

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        question = [{"role": "user", "content": f"question {next(QUESTIONS)}"}]
        answer = await self.llm.ask(question, Scale)
        for place, trajectory in enumerate(group):
            trajectory.reward = place * answer.value.scale
        return group


class SeenSteps(TraceSink):
    """A sink."""

    name = "seen"

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def step_finished(self, event: StepFinished) -> None:
        self.metrics.append(dict(event.metrics))


@pytest.fixture
def server() -> Iterator[ScriptedTraining]:
    with scripted_training() as training:
        yield training


@pytest.fixture
def endpoint() -> Iterator[ScriptedLlm]:
    with scripted_llm([says('{"scale": 1}')]) as endpoint:
        yield endpoint


async def rollout(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
    """One that names a call."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    mark = {"offbook": {"call_id": f"call-{next(QUESTIONS)}", "index": 0}}
    return Trajectory(messages_and_choices=[Choice.model_validate(choice | mark)])


async def trained(server: ScriptedTraining, steps: int, **options: Any) -> tuple[TrainReport, str]:
    """The report of a run, and what it said."""
    out = io.StringIO()
    options = {"rollout": rollout, "group_size": 2, "scenarios_per_step": 1, **options}
    trainer = Trainer(
        server.model(),
        options.pop("rollout"),
        SCENARIOS,
        progress=PlainProgress(Console(file=out, width=400), 9),
        **options,
    )
    return await trainer.atrain(steps), out.getvalue()


async def test_a_run_ends_cleanly_when_its_budget_is_spent_and_keeps_its_steps(
    server: ScriptedTraining, endpoint: ScriptedLlm
) -> None:
    report, said = await trained(server, 10, judge=ScriptedJudge(endpoint), max_cost=3.0)
    assert (report.stopped, report.step, len(report.iterations)) == (Stopped.BUDGET, 3, 3)
    assert (len(server.requests), len(endpoint.requests)) == (3, 3)
    assert report.spending["judge"].cost == pytest.approx(3.0)
    assert "max_cost=3 USD for other LLMs is spent (3.0000 USD)" in said
    assert "judge: 3 questions, 3 requests, 30 + 15 tokens, 3.0000 USD" in said
    assert "agent is at step 3, stopped: max_cost= for other LLMs is spent. Raise it and run the same again" in said
    assert server.finishes > 3  # the rollouts of the fourth iteration are kept
    again, _ = await trained(server, 5, judge=ScriptedJudge(endpoint), max_cost=3.0)
    assert (again.stopped, again.started, again.step) == (Stopped.FINISHED, 3, 5)


async def test_each_step_has_its_costs_and_tokens_as_metrics(server: ScriptedTraining, endpoint: ScriptedLlm) -> None:
    sink = SeenSteps()
    report, _ = await trained(server, 2, judge=ScriptedJudge(endpoint), sinks=[sink], scenarios_per_step=1)
    for metrics in [*sink.metrics, *(each.metrics for each in report.iterations)]:
        assert metrics["costs/judge"] == pytest.approx(1.0)
        assert (metrics["tokens/judge/prompt"], metrics["tokens/judge/completion"]) == (10, 5)
    assert report.spending["judge"].questions == 2


async def test_a_client_that_dies_during_a_step_has_logged_what_its_rollouts_cost(
    server: ScriptedTraining, endpoint: ScriptedLlm
) -> None:
    server.close(2)
    run = asyncio.create_task(trained(server, 3, judge=ScriptedJudge(endpoint)))
    assert await asyncio.to_thread(server.arrived[2].wait, 60)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    server.gates[2].set()
    await trained(server, 3, judge=ScriptedJudge(endpoint))
    assert sum(log["metrics"]["costs/judge"] for log in server.logs) == len(endpoint.requests)
    assert len({log["trajectory_ids"][0] for log in server.logs}) == len(server.logs) == len(server.requests)


async def test_a_judging_that_ends_halfway_has_logged_what_its_answers_cost(server: ScriptedTraining) -> None:
    with scripted_llm([says('{"scale": 1}')]) as endpoint:
        judge, paid = ScriptedJudge(endpoint), asyncio.Event()

        async def halfway(group: TrajectoryGroup) -> TrajectoryGroup:
            await judge(group)
            paid.set()
            return await asyncio.Future[TrajectoryGroup]()

        run = asyncio.create_task(trained(server, 1, judge=halfway))
        await asyncio.wait_for(paid.wait(), 60)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        assert [log["metrics"]["costs/judge"] for log in server.logs] == [1.0]
        await trained(server, 1, judge=judge)
    assert sum(log["metrics"]["costs/judge"] for log in server.logs) == len(endpoint.requests) == 2


async def test_an_unknown_price_is_said_and_with_a_budget_refused(
    server: ScriptedTraining, endpoint: ScriptedLlm
) -> None:
    judge = ScriptedJudge(endpoint, prices=None)
    report, said = await trained(server, 1, judge=judge)
    assert "costs/judge" not in report.iterations[0].metrics
    assert report.iterations[0].metrics["llms/judge/unpriced"] == 1
    assert "1 request of unknown price" in said
    with pytest.raises(ConfigError, match=r"max_cost needs the price of 'openai/judge'.*prices="):
        await trained(server, 2, judge=judge, max_cost=5)


async def test_an_update_under_way_is_awaited_and_trained(server: ScriptedTraining, endpoint: ScriptedLlm) -> None:
    config = TrainConfig(overlap=True)
    server.close(2)
    run = asyncio.create_task(trained(server, 10, judge=ScriptedJudge(endpoint), max_cost=2.0, config=config))
    async with asyncio.timeout(60):
        while server.finishes < 5:  # kept before and after judging twice, and before the third
            await asyncio.sleep(0.01)
        assert not run.done()
        server.gates[2].set()
        report, _ = await run
    assert (report.stopped, report.step) == (Stopped.BUDGET, 2)


async def test_an_update_that_fails_meanwhile_is_an_error_all_the_same(
    server: ScriptedTraining, endpoint: ScriptedLlm
) -> None:
    server.failing.add(2)
    with pytest.raises(TrainError, match="NaN in a gradient"):
        await trained(server, 10, judge=ScriptedJudge(endpoint), max_cost=2.0, config=TrainConfig(overlap=True))


async def test_what_a_rollout_asks_counts_and_ends_the_run_too(server: ScriptedTraining, endpoint: ScriptedLlm) -> None:
    user = Llm("openai/user", api_base=endpoint.url, cache=None, prices=PRICES)

    async def talks(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        await user.ask_text([{"role": "user", "content": "hello"}], purpose="user")
        trajectory = await rollout(model, scenario)
        trajectory.reward = float(next(QUESTIONS))
        return trajectory

    report, _ = await trained(server, 10, rollout=talks, max_cost=5.0, retries=2)
    assert (report.stopped, report.step) == (Stopped.BUDGET, 2)
    assert report.spending["user"].cost == pytest.approx(5.0)


async def test_an_evaluation_counts_too(server: ScriptedTraining, endpoint: ScriptedLlm) -> None:
    judge = ScriptedJudge(endpoint)
    report, _ = await trained(server, 10, judge=judge, max_cost=3.0, eval=[{"id": str(n)} for n in range(2)])
    assert (report.stopped, report.step, len(report.evaluations)) == (Stopped.BUDGET, 1, 1)
    trainer = Trainer(server.model(), rollout, SCENARIOS, judge=judge, max_cost=0.5)
    with pytest.raises(BudgetExceeded, match="max_cost"):
        await trainer.aevaluate([{"id": str(n)} for n in range(3)])


@pytest.mark.parametrize("amount", [0, -1.0, float("nan"), "5"])
def test_a_wrong_amount_is_refused_before_the_first_rollout(server: ScriptedTraining, amount: Any) -> None:
    with pytest.raises(ConfigError, match="max_cost: USD above 0"):
        Trainer(server.model(), rollout, SCENARIOS, max_cost=amount)


@pytest.mark.parametrize(
    ("reply", "requests", "log"),
    [
        (refuses("no"), 1, "refused"),
        (says("nonsense"), 2, "does not fit"),
    ],
)
async def test_a_judge_whose_llm_gives_no_answer_drops_its_group_and_is_not_asked_again(
    reply: LlmReply, requests: int, log: str
) -> None:
    group = TrajectoryGroup([Trajectory(), Trajectory()])
    with scripted_llm([reply]) as endpoint:
        [kept] = await judged([group], ScriptedJudge(endpoint))
    assert [trajectory.reward for trajectory in kept] == [None, None]
    assert (len(endpoint.requests), log in kept.logs[0]) == (requests, True)


async def test_an_account_that_fails_for_every_group_ends_the_run() -> None:
    groups = [TrajectoryGroup([Trajectory()]) for _ in range(3)]
    with scripted_llm([fails(401, "no such key")]) as endpoint, pytest.raises(LlmError, match="no such key") as raised:
        await judged(groups, ScriptedJudge(endpoint))
    assert raised.value.kind == "authentication"
