"""The trainer's pure parts: order, splits, rewards, summaries, sinks and the progress view."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from offbook import LocalBackend, RemoteBackend, TrainableModel, Trajectory, TrajectoryGroup
from offbook.base.errors import ConfigError, RolloutError
from offbook.client.rollouts.failures import FailureKind
from offbook.contracts import Alert
from offbook.rewards.reward_result import RewardResult, as_reward
from offbook.scenarios.identity import scenario_id, scenario_text
from offbook.trainer.evaluate import summarise
from offbook.trainer.messages import step_note, watch_line
from offbook.trainer.models import ModelStep, StepOutcome
from offbook.trainer.progress import Doing, PlainProgress
from offbook.trainer.report import Iteration
from offbook.trainer.run import Repeats, batch


def scored(*rewards: float | None, **metrics: float) -> TrajectoryGroup:
    return TrajectoryGroup([Trajectory(reward=reward, metrics=dict(metrics)) for reward in rewards])


def test_every_scenario_comes_once_per_epoch_in_an_order_of_seed_and_iteration_alone() -> None:
    scenarios = list(range(12))
    taken = [batch(scenarios, 4, iteration, seed=1) for iteration in range(6)]
    assert sorted(chain.from_iterable(taken[:3])) == scenarios
    assert sorted(chain.from_iterable(taken[3:])) == scenarios
    assert taken[:3] != taken[3:]
    assert [batch(scenarios, 4, iteration, seed=1) for iteration in (4, 5)] == taken[4:]
    assert batch(scenarios, 4, 0, seed=2) != taken[0]


def test_a_batch_holds_nothing_twice_even_where_two_epochs_meet() -> None:
    for iteration in range(20):
        taken = batch(range(5), 3, iteration, seed=0)
        assert len(set(taken)) == 3
    assert sorted(batch(range(3), 8, 2, seed=0)) == [0, 1, 2]


def test_a_scenarios_id_is_its_own_or_follows_from_its_content() -> None:
    @dataclass
    class Task:
        question: str
        id: str | None = None

    assert scenario_id({"id": 7}) == "7"
    assert scenario_id(Task("why?", "a")) == "a"
    assert scenario_id({"question": "why?", "n": 1}) == scenario_id({"n": 1, "question": "why?"})
    assert scenario_id("why?") != scenario_id("who?")
    assert scenario_id("Where is box 4821?").startswith("where-is-box-4821-")
    assert len(scenario_id("w/ " * 900)) < 60
    assert scenario_text(Task("why?")) == "why?"
    with pytest.raises(ConfigError, match="its keys are task"):
        scenario_text({"task": "why?"})


def test_an_evaluation_counts_each_scenario_once_and_failed_rollouts_not_as_zero() -> None:
    groups = [scored(1.0, 0.0, success=1.0), scored(1.0, success=0.0), scored(None)]
    found = summarise(groups, {"agent": 3}, temperature=0.0)
    assert (found.scenarios, found.scored, found.failed) == (3, 2, 1)
    assert found.reward == pytest.approx(0.75)
    assert found.reward_spread == pytest.approx(0.3535533905932738)
    assert found.reward_error == pytest.approx(0.25)
    assert found.success == pytest.approx(0.5)
    line = "step 3, greedy, 2 scenarios: success 50%, reward 0.750, 95 % interval 0.500 to 1.000, 1 rollout failed"
    assert str(found).startswith(line)


def test_an_evaluation_says_nothing_where_nothing_was_measured() -> None:
    one = summarise([scored(1.0)], {"agent": 3}, temperature=0.0)
    assert str(one) == "step 3, greedy, 1 scenario: reward 1.000"
    assert one.as_metrics().keys() == {"scenarios", "failed", "reward"}
    none = summarise([scored(None)], {"agent": 3}, temperature=0.0)
    assert str(none).startswith("step 3, greedy, 0 scenarios: reward -, 1 rollout failed")
    assert none.as_metrics() == {"scenarios": 1.0, "failed": 1.0}


def test_a_state_returned_for_a_reward_is_named_by_its_keys() -> None:
    with pytest.raises(RolloutError, match="a dict without `reward`; its keys are messages, topic"):
        as_reward({"messages": [], "topic": "x"}, "reward=")


def test_a_run_says_where_it_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Path(sys.executable).with_name("offbook")
    monkeypatch.setenv("PATH", str(tmp_path))  # an environment that is not active
    monkeypatch.chdir(tmp_path)  # a command below the working directory is shown by its relative path
    folder = tmp_path / "of mine"
    models = [TrainableModel(name, base_model="tiny", backend=LocalBackend(folder)) for name in ("planner", "writer")]
    assert watch_line(models, "run-1") == f"watch the run: {command} ui --dir '{folder}'"
    monkeypatch.setenv("PATH", str(command.parent))
    assert watch_line(models, "run-1") == f"watch the run: offbook ui --dir '{folder}'"
    other = TrainableModel("reader", base_model="tiny", backend=RemoteBackend("http://gpu-box:8000/"))
    assert watch_line([models[0], other], "run-1").endswith(", http://gpu-box:8000/runs/run-1")


def test_rewards_are_numbers_or_dicts_of_numbers_also_those_of_numpy_and_torch() -> None:
    assert as_reward(True, "reward=") == RewardResult(1.0)
    assert as_reward({"reward": 0.5, "length": 3}, "reward=") == RewardResult(0.5, {"length": 3.0})
    halves = (np.float32(0.5), np.array(0.5), torch.tensor(0.5, requires_grad=True), Decimal("0.5"))
    assert [as_reward(half, "reward=") for half in halves] == [RewardResult(0.5)] * 4
    found = as_reward(RewardResult(np.bool_(True), {"n": torch.tensor(3)}), "reward=")  # type: ignore[arg-type]
    assert (found, type(found.reward), type(found.metrics["n"])) == (RewardResult(1.0, {"n": 3.0}), float, float)


@pytest.mark.parametrize(
    "wrong",
    [
        "1",
        None,
        [1.0],
        float("nan"),
        10**400,
        1.1e100,
        np.float64(-1e308),
        {"reward": 1.0, "length": 1e308},
        RewardResult(1e308),
        1j,
        {"score": 1.0},
        {"reward": "x"},
        np.array([0.5]),
        np.array("1"),
        np.complex64(1),
        torch.tensor([0.5, 1.0]),
        torch.tensor(float("inf")),
        RewardResult("x"),  # type: ignore[arg-type]
        RewardResult(1.0, {"length": None}),  # type: ignore[dict-item]
        RewardResult(1.0, None),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_what_is_no_finite_number_is_no_reward(wrong: object) -> None:
    with pytest.raises(RolloutError, match="reward="):
        as_reward(wrong, "reward=")


METRICS = {"tokens/trained": 1234.0, "kl/sampler_learner": 0.00012, "staleness/mean": 0.75, "staleness/max": 1.0}


def test_away_from_a_terminal_each_step_is_one_line_and_the_first_one_is_announced() -> None:
    out = io.StringIO()
    progress = PlainProgress(Console(file=out, width=40), 9)
    for what in ("rollouts", "training, rollouts", "rollouts"):
        progress.doing(what)
    progress.finished(Iteration(3, True, 0.5, 0.25, 2, 1.25, 2.0, METRICS), 4, "2 rollouts failed")
    progress.doing("training")
    assert out.getvalue() == (
        "rollouts ...\ntraining, rollouts ...\n"
        "step 3/9  iteration 4  reward 0.500  success 25%  rollouts 1.2 s  training 2.0 s  staleness 0.75, max 1  taught -  tokens 1,234  KL 0.0001  2 rollouts failed\n"
    )


def test_what_goes_on_at_once_is_told_as_one_line_until_it_ends() -> None:
    told: list[str] = []

    class Told(PlainProgress):
        def doing(self, what: str) -> None:
            told.append(what)

    doing = Doing(Told(Console(file=io.StringIO()), 9))
    with doing("training step 2 of agent"), doing("32 rollouts with step 1"):
        pass
    assert told == [
        "training step 2 of agent",
        "training step 2 of agent, 32 rollouts with step 1",
        "training step 2 of agent",
    ]


def test_one_scenario_is_said_in_the_singular() -> None:
    group = TrajectoryGroup([Trajectory(reward=1.0)])
    assert ", 1 scenario: " in str(summarise([group], {"agent": 1}, 0.0))


def test_the_row_of_a_step_says_that_the_tree_was_refused() -> None:
    def note(refused: float) -> str:
        step = Iteration(3, True, 0.5, None, 0, 1.0, 2.0, metrics={"layout/tree_refused": refused})
        step.models["agent"] = ModelStep(3, StepOutcome.TRAINED)
        return step_note(step, Repeats())

    assert (note(1.0), note(0.0)) == ("plain rows: the tree is refused", "")


def test_a_sentence_is_said_once_in_a_run_and_counted_at_its_end() -> None:
    repeats = Repeats()
    alert = Alert("run", "agent", 3, 0.0, "kl", "kl/base is 0.25, above 0.1: lower the learning rate", 0.25, 0.1)
    equal = "all rewards of each group are equal"
    notes: list[str] = []
    for why, alerts, kinds in [
        (equal, [alert], [FailureKind("KeyError", "'city'", count=2)]),
        (
            equal,
            [replace(alert, message=alert.message.replace("0.25", "3.1e-02"))],
            [FailureKind("KeyError", "'city'")],
        ),
        ("the gradient is exactly zero over 16 sampled tokens", [], []),
        ("the gradient is exactly zero over 9 sampled tokens", [], []),
    ]:
        failed = sum(kind.count for kind in kinds)
        step = Iteration(3, False, 0.5, None, failed, 1.0, 2.0, failures=tuple(kinds), alerts=tuple(alerts))
        step.models["agent"] = ModelStep(3, StepOutcome.NO_SIGNAL, why=why)
        step.models["writer"] = ModelStep(3, StepOutcome.NO_SIGNAL, why=equal)
        notes.append(step_note(step, repeats))
    other = "writer: step 3, no signal"
    assert notes == [
        f"no signal: {equal}; {other}; 2 rollouts failed: 2 x KeyError: 'city'; alert: {alert.message}",
        f"no signal; {other}; 1 rollout failed",
        f"no signal: the gradient is exactly zero over 16 sampled tokens; {other}",
        f"no signal; {other}",
    ]
    assert repeats.repeated() == ["in 2 iterations: alert: kl/base is 3.1e-02, above 0.1: lower the learning rate"]
