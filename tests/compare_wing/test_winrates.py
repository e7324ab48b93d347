"""Win rates against hand counts and simulation; a judge sees no names."""

from __future__ import annotations

import random
from collections.abc import Callable

from offbook import Trajectory, TrajectoryGroup
from offbook_compare.journal import ComparedRollout
from offbook_compare.judging import JudgedRollout, blind, judge_side_by_side, win_rate


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


def rollouts(name: str, text: Callable[[int], str], scenarios: int) -> list[ComparedRollout]:
    rows: list[ComparedRollout] = []
    for number in range(scenarios):
        answer = {"role": "assistant", "content": text(number), "name": name}
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": f"task {number}"}, answer])
        fields = {"candidate": name, "scenario": str(number), "index": 0, "metrics": {}, "seconds": 1.0}
        rows.append(ComparedRollout(key=f"{name}-{number}", trajectory=trajectory, **fields))
    return rows


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


async def test_a_judge_that_prefers_the_first_position_finds_equal_candidates_equal() -> None:
    candidates = {name: rollouts(name, lambda number: f"answer {number}", 200) for name in ("x", "y", "z")}
    groups, dropped = await judge_side_by_side(candidates, first_is_best, seed=0)
    assert dropped == 0
    for name in ("y", "z"):
        found = win_rate(groups, name, "x")
        assert found is not None and found.rate.low <= 0.5 <= found.rate.high


async def test_the_judge_sees_no_names_and_failed_rollouts_are_left_out() -> None:
    shown: list[TrajectoryGroup] = []

    async def looks(group: TrajectoryGroup) -> TrajectoryGroup:
        shown.append(group)
        return await first_is_best(group)

    candidates = {name: rollouts(name, lambda number: "same", 4) for name in ("secret-x", "secret-y", "secret-z")}
    last = candidates["secret-z"]
    last[0] = last[0].model_copy(update={"error": "ValueError: no"})
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
