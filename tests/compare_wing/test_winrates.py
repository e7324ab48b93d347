"""Win rates against hand counts, references and simulation; judges with a bias are told."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from offbook import Trajectory, TrajectoryGroup
from offbook.llms import Llm
from offbook.trainer.evaluate import summarise
from offbook_compare.candidates import Candidate, of_llm
from offbook_compare.journal import ComparedRollout
from offbook_compare.judged_groups import blind, judge_side_by_side
from offbook_compare.results import Scored
from offbook_compare.winrates import JudgedRollout, length_controlled, win_rate


def rollout(score: float, length: int = 10) -> JudgedRollout:
    return JudgedRollout(score, length)


def test_wins_ties_and_losses_are_counted_by_hand() -> None:
    groups = [
        ("a", {"x": rollout(0.9), "y": rollout(0.1)}),
        ("b", {"x": rollout(0.5), "y": rollout(0.5)}),
        ("c", {"x": rollout(0.2), "y": rollout(0.3)}),
        ("d", {"x": rollout(0.8), "y": rollout(0.3)}),
        ("e", {"y": rollout(0.3)}),
    ]
    found = win_rate(groups, "x", "y")
    assert found is not None
    assert (found.rate.mean, found.ties, found.scenarios, found.longer) == (0.625, 0.25, 4, 0.5)
    assert win_rate(groups[4:], "x", "y") is None


def test_rollouts_of_one_scenario_are_averaged_before_they_count() -> None:
    once = [("a", {"x": rollout(1), "y": rollout(0)}), ("b", {"x": rollout(0), "y": rollout(1)})]
    found = win_rate([once[0]] * 9 + [once[1]], "x", "y")
    assert found is not None and (found.rate.mean, found.scenarios) == (0.5, 2)


def test_the_interval_of_equal_candidates_holds_one_half_in_about_95_of_100_comparisons() -> None:
    held = 0
    for seed in range(50):
        generator = random.Random(seed)
        groups = [(str(at), {"x": rollout(generator.random()), "y": rollout(generator.random())}) for at in range(60)]
        found = win_rate(groups, "x", "y", seed=seed)
        assert found is not None
        held += found.rate.low <= 0.5 <= found.rate.high
    assert 44 <= held <= 50


def biased(gaps: np.ndarray, quality: float, seed: int) -> np.ndarray:
    """Wins by a judge with this slope for length, and this quality of the candidate, in log odds."""
    lengths = np.tanh(gaps / np.std(gaps))
    chances = 1 / (1 + np.exp(-(quality + 3.0 * lengths)))
    return (np.random.default_rng(seed).random(len(gaps)) < chances).astype(float)


@pytest.mark.parametrize(("quality", "truth"), [(0.0, 0.5), (1.0, 1 / (1 + np.exp(-1.0)))])
def test_at_equal_length_only_quality_is_left(quality: float, truth: float) -> None:
    """The candidate writes more in most pairs, and the judge likes that: the plain rate is too high, the other one is not."""
    held, plain, means = 0, list[float](), list[float]()
    for seed in range(20):
        gaps = np.random.default_rng(seed).normal(40, 60, size=150)
        wins = biased(gaps, quality, seed=100 + seed)
        found = length_controlled(wins, gaps, [str(at) for at in range(150)])
        assert found is not None
        held += found.low <= truth <= found.high
        plain.append(float(wins.mean()))
        means.append(found.mean)
    assert held >= 16
    assert np.mean(means) == pytest.approx(truth, abs=0.04)
    assert np.mean(plain) > truth + 0.05


def test_the_fit_is_where_plain_gradient_ascent_ends() -> None:
    gaps = np.random.default_rng(2).normal(20, 50, size=150)
    wins = biased(gaps, 0.5, seed=3)
    columns = np.stack([np.ones(150), np.tanh(gaps / np.std(gaps))], axis=1)
    beta = np.zeros(2)
    for _ in range(20_000):
        beta += 0.01 * (columns.T @ (wins - 1 / (1 + np.exp(-columns @ beta))) - 0.01 * beta)
    found = length_controlled(wins, gaps, [str(at) for at in range(150)])
    assert found is not None and found.mean == pytest.approx(1 / (1 + np.exp(-beta[0])), abs=1e-6)


def test_where_one_side_is_always_longer_nobody_can_tell() -> None:
    gaps = np.random.default_rng(0).uniform(5, 50, size=100)
    assert length_controlled(np.ones(100), gaps, [str(at) for at in range(100)]) is None


def test_equal_lengths_leave_the_plain_rate() -> None:
    wins = np.array([1.0] * 30 + [0.0] * 10)
    found = length_controlled(wins, np.zeros(40), [str(at) for at in range(40)])
    assert found is not None and found.mean == pytest.approx(0.75, abs=0.005)


def scored(name: str, text: Callable[[int], str], scenarios: int) -> Scored:
    rows: list[ComparedRollout] = []
    for at in range(scenarios):
        said = {"role": "assistant", "content": text(at), "name": name}
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": f"task {at}"}, said])
        rows.append(
            ComparedRollout(
                key=f"{name}-{at}",
                candidate=name,
                scenario=str(at),
                index=0,
                metrics={},
                seconds=1.0,
                trajectory=trajectory,
            )
        )
    groups = [TrajectoryGroup([row.trajectory]) for row in rows]
    candidate: Candidate = of_llm(name, Llm("openai/x", cache=None))
    return Scored(candidate, rows, summarise(groups, {name: 0}, 0.0))


async def first_is_best(group: TrajectoryGroup) -> TrajectoryGroup:
    """A judge that prefers what stands first."""
    scores = [1.0 - at / len(group) for at in range(len(group))]
    return group.model_copy(
        update={
            "trajectories": [
                each.model_copy(update={"reward": score}) for each, score in zip(group, scores, strict=True)
            ]
        }
    )


async def longest_is_best(group: TrajectoryGroup) -> TrajectoryGroup:
    """A judge that prefers what is long."""
    lengths = [len(str(each.messages()[-1].get("content"))) for each in group]
    return group.model_copy(
        update={
            "trajectories": [
                each.model_copy(update={"reward": length / 1000}) for each, length in zip(group, lengths, strict=True)
            ]
        }
    )


async def test_a_judge_that_prefers_the_first_position_finds_equal_candidates_equal() -> None:
    candidates = [scored(name, lambda at: f"answer {at}", 200) for name in ("x", "y", "z")]
    groups, dropped = await judge_side_by_side(candidates, first_is_best, seed=0)
    assert dropped == 0
    for name in ("y", "z"):
        found = win_rate(groups, name, "x")
        assert found is not None and found.rate.low <= 0.5 <= found.rate.high


async def test_a_judge_that_prefers_long_answers_is_told_by_the_rate_at_equal_length() -> None:
    """Both say the same; one adds words more often."""

    def wordy(most: int, seed: int) -> Callable[[int], str]:
        generator = random.Random(seed)
        return lambda at: f"answer {at}" + " indeed" * generator.randint(0, most)

    candidates = [scored("x", wordy(20, 1), 300), scored("y", wordy(30, 2), 300)]
    groups, _ = await judge_side_by_side(candidates, longest_is_best, seed=0)
    found = win_rate(groups, "y", "x")
    assert found is not None and found.rate.low > 0.5 and found.longer > 0.6
    assert found.at_equal_length is not None
    assert found.at_equal_length.low <= 0.5 <= found.at_equal_length.high


async def test_the_judge_sees_no_names_and_failed_rollouts_are_left_out() -> None:
    shown: list[TrajectoryGroup] = []

    async def looks(group: TrajectoryGroup) -> TrajectoryGroup:
        shown.append(group)
        return await first_is_best(group)

    candidates = [scored(name, lambda at: "same", 4) for name in ("secret-x", "secret-y", "secret-z")]
    failed = candidates[2].rows[0].model_copy(update={"error": "ValueError: no"})
    candidates[2] = Scored(candidates[2].candidate, [failed, *candidates[2].rows[1:]], candidates[2].evaluation)
    await judge_side_by_side(candidates, looks, seed=0)
    assert [len(group) for group in shown] == [2, 3, 3, 3]
    assert "secret" not in "".join(group.model_dump_json() for group in shown)


def test_a_blind_trajectory_has_the_conversations_only() -> None:
    whole = Trajectory(
        messages_and_choices=[{"role": "assistant", "content": "hi", "name": "gpt"}],
        metadata={"model": "gpt"},
        metrics={"cost": 1.0},
        reward=1.0,
    )
    found = blind(whole)
    assert found.messages() == [{"role": "assistant", "content": "hi"}]
    assert (found.metadata, found.metrics, found.reward) == ({}, {}, None)
    assert found.id != whole.id
