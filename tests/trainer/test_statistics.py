"""What an evaluation's numbers are worth: pass@k, intervals, and gates for continuous integration."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook.base.types import RolloutPlace, Trajectory, TrajectoryGroup
from offbook.trainer.evaluate import (
    Evaluation,
    RegressionGate,
    ScenarioScore,
    bootstrap_mean,
    interval_lines,
    paired_difference,
    pass_at_k,
    read_report,
    report_json,
    summarise,
)


@pytest.mark.parametrize(("rollouts", "successes"), [(4, 1), (5, 0), (5, 5), (6, 2)])
def test_pass_at_k_is_the_share_of_all_draws_with_a_success(rollouts: int, successes: int) -> None:
    outcomes = [True] * successes + [False] * (rollouts - successes)
    for k in range(1, rollouts + 1):
        draws = list(itertools.combinations(outcomes, k))
        assert pass_at_k(rollouts, successes, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_as_many_rollouts(k: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"pass@{k}: at least {k} scored rollouts of a scenario are needed, it has 4"
    ):
        pass_at_k(4, 1, k)


def test_the_interval_is_that_of_scipy() -> None:
    values = [0, 0, 1, 1, 1, 0, 1, 1, 0.5, 0.25, 1, 0, 0.75, 1, 1, 0, 0, 1, 1, 0.5]
    found = bootstrap_mean(values, resamples=200_000)
    # scipy.stats.bootstrap((values,), np.mean, n_resamples=200_000, method="percentile"), scipy 1.17: 0.4, 0.7875
    assert (found.mean, found.low, found.high) == pytest.approx((0.6, 0.4, 0.7875))


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says() -> None:
    rng = random.Random(5)
    inside = 0
    for seed in range(300):
        values = [float(rng.random() < 0.7) for _ in range(60)]
        found = bootstrap_mean(values, seed=seed, resamples=1_000)
        inside += found.low <= 0.7 <= found.high
    assert 0.90 <= inside / 300 <= 0.98  # 95 % is claimed; 1.3 points is the error of 300 draws


def test_no_values_have_no_interval_and_one_says_nothing_about_others() -> None:
    with pytest.raises(ConfigError, match="no scenario has a value"):
        bootstrap_mean([])
    assert (bootstrap_mean([0.5]).low, bootstrap_mean([0.5]).high) == (0.5, 0.5)


def test_a_paired_difference_leaves_out_what_makes_scenarios_hard() -> None:
    rng = random.Random(3)
    hard = {str(number): rng.random() for number in range(50)}
    better = {name: value + 0.05 for name, value in hard.items()}
    found = paired_difference({**better, "new": 9.0}, {**hard, "old": -9.0})
    assert (found.mean, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    assert bootstrap_mean(list(better.values())).low < bootstrap_mean(list(hard.values())).mean
    with pytest.raises(ConfigError, match="share no scenario"):
        paired_difference({"a": 1.0}, {"b": 1.0})


def group(name: str, *rewards: float | None, **metrics: float) -> TrajectoryGroup:
    place = RolloutPlace(scenario=name)
    return TrajectoryGroup([Trajectory(reward=reward, metrics=dict(metrics), place=place) for reward in rewards])


def evaluation(**rewards: float) -> Evaluation:
    return summarise([group(name, reward) for name, reward in rewards.items()], {"agent": 1}, 0.0)


def test_an_evaluation_keeps_what_each_scenario_earned() -> None:
    found = summarise([group("a", 1.0, 0.5, None), group("b", 0.25, success=1.0)], {"agent": 3}, 1.0)
    assert found.scores == (ScenarioScore("a", (1.0, 0.5), (), 1), ScenarioScore("b", (0.25,), (1.0,), 0))
    assert (found.rewards(), found.successes()) == ({"a": 0.75, "b": 0.25}, {"b": 1.0})
    assert found.successes(success_at=1.0) == {"a": 0.5, "b": 0.0}
    assert found.pass_at(1, success_at=1.0) == 0.25
    assert found.pass_at(2, success_at=1.0) == 1.0  # of the scenario with two scored rollouts
    with pytest.raises(ConfigError, match=r"pass@2: no scenario has 2 rollouts with a success: .*success_at="):
        found.pass_at(2)


def test_the_lines_say_success_where_there_is_one_else_reward() -> None:
    assert interval_lines(evaluation(a=0.5, b=0.5)) == ["reward 0.500, 95 % interval 0.500 to 0.500 over 2 scenarios"]
    found = summarise([group("a", 1.0, 1.0, 0.0), group("b", 0.0, 0.0, 0.0)], {"agent": 3}, 1.0)
    assert interval_lines(found, success_at=1.0)[1] == "pass@1 0.333, pass@3 0.500"


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    found = summarise([group("a", 1.0, None, success=1.0)], {"agent": 3}, 0.0)
    (tmp_path / "report.json").write_text(report_json(found))
    assert read_report(tmp_path / "report.json") == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a report of .*Expecting"),
        ("[]", "it has no `scores`"),
        ('{"reward": 1}', "it has no `scores`"),
        (json.dumps(asdict(evaluation(a=1.0)) | {"scenarios": "many"}), r"report.json.scenarios: .*\(got 'many'\)"),
    ],
)
def test_a_file_that_is_no_report_is_refused_with_its_field(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_report(tmp_path / "report.json")
    with pytest.raises(ConfigError, match="No such file"):
        read_report(tmp_path / "none.json")


def test_a_gate_closes_below_a_number_and_where_it_is_surely_worse(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    before = evaluation(**{f"s{number}": 1.0 for number in range(20)})
    file.write_text(report_json(before))
    assert RegressionGate(None, None).examine(before) == ([], [])
    assert RegressionGate(1.0, file).examine(before)[1] == []
    worse = evaluation(**{f"s{number}": float(number % 2) for number in range(20)})
    said, faults = RegressionGate(0.6, file).examine(worse)
    assert said[0].startswith(f"reward against {file}: -0.500, 95 % interval -0.7")
    assert faults == [
        "--fail-below 0.6: reward 0.500 is below it",
        f"--fail-if-worse-than {file}: reward is lower by 0.500",
    ]
    unsure = evaluation(**{f"s{number}": 0.0 if number == 0 else 1.0 for number in range(20)})
    assert RegressionGate(None, file).examine(unsure)[1] == []  # the interval of the difference reaches 0


def test_a_gate_refuses_a_baseline_that_measures_something_else(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    file.write_text(report_json(evaluation(a=1.0)))
    by_success = summarise([group("a", 1.0, success=1.0)], {"agent": 3}, 0.0)
    with pytest.raises(ConfigError, match="measures reward, this evaluation success: give --success-at"):
        RegressionGate(None, file).examine(by_success)
    assert math.isclose(replace(by_success).pass_at(1), 1.0)
