"""Judges made of judges and reward functions."""

from __future__ import annotations

from typing import Any

import pytest

import offbook
from offbook.base.errors import ConfigError, RolloutError
from offbook.contracts import Judge
from offbook.rewards import GateJudge, TieJudge
from offbook.testing import attempts_shown, scripted_llm
from offbook.trainer.judging import judged
from tests.rewards.scripted_judge import FAILED, group_of, honest, judge_at, rewards, said


def number(trajectory: offbook.Trajectory) -> int:
    return int(str(trajectory.messages()[-1]["content"]).split()[-1])  # type: ignore[typeddict-item]


def scores(*values: float | None) -> Judge:
    """A judge that gives these, in order."""

    async def judge(group: offbook.TrajectoryGroup) -> offbook.TrajectoryGroup:
        for trajectory, value in zip(group, values, strict=True):
            trajectory.reward = value
            trajectory.log(f"scored {value}")
        group.log("judged")
        group.metrics["judge/cut"] = 0.0
        return group

    return judge


async def nothing(group: offbook.TrajectoryGroup) -> None:
    return None


async def test_the_judge_is_asked_for_ties_only_and_never_turns_the_order_of_rewards() -> None:
    group = offbook.TrajectoryGroup(
        [said("I count 90", reward=0.0), said("I count 10", reward=1.0), said("I count 20", reward=0.0),
         said("I count 30", reward=1.0), said("I count 99", reward=0.5), said("I count 50", exception=FAILED)]
    )  # fmt: skip
    with scripted_llm(honest) as endpoint:
        scored = await TieJudge(judge_at(endpoint))(group)
    assert rewards(scored) == pytest.approx([0.225, 1.025, 0.05, 1.075, 0.5, None])
    shown = [sorted(str(each[0].messages[-1]["content"]) for each in attempts_shown(request.messages).values())
             for request in endpoint.requests]  # fmt: skip
    assert sorted(shown) == [["I count 10", "I count 30"], ["I count 20", "I count 90"]]


async def test_where_all_rewards_are_equal_the_judge_decides() -> None:
    group = offbook.TrajectoryGroup([said("I count 80", reward=1.0), said("I count 20", reward=1.0)])
    with scripted_llm(honest) as endpoint:
        scored = await TieJudge(judge_at(endpoint))(group)
    assert rewards(scored) == pytest.approx([1.4, 1.1]) and scored is not None and scored.metrics["judge/tie"] == 0


async def test_a_reward_without_ties_asks_nobody() -> None:
    async def reward(trajectory: offbook.Trajectory) -> offbook.RewardResult:
        return offbook.RewardResult(number(trajectory), {"part/number": number(trajectory)})

    scored = await TieJudge(nothing, reward)(group_of(1, 2))
    assert rewards(scored) == [1, 2] and scored is not None and scored.trajectories[1].metrics == {"part/number": 2}
    assert await TieJudge(nothing, lambda trajectory: 0.5)(group_of(1, 2)) is None


async def test_ties_need_a_reward_and_scores_from_0_to_1() -> None:
    with pytest.raises(RolloutError, match="no trajectory has a reward"):
        await TieJudge(nothing)(group_of(1, 2))
    with pytest.raises(ConfigError, match=r"its judge gave 2\.0; scores from 0 to 1"):
        await TieJudge(scores(2.0, 0.0), lambda trajectory: 0.5)(group_of(1, 2))


async def test_a_gate_keeps_what_does_not_pass_from_the_judge() -> None:
    def large(trajectory: offbook.Trajectory) -> bool:
        return number(trajectory) >= 20

    group = offbook.TrajectoryGroup(
        [said("I count 10"), said("I count 90"), said("I count 40"), said("I", exception=FAILED)]
    )
    with scripted_llm(honest) as endpoint:
        scored = await GateJudge(large, judge_at(endpoint), closed=-0.5)(group)
        assert rewards(await GateJudge(large, judge_at(endpoint))(group_of(1, 2))) == [0.0, 0.0]
    assert rewards(scored) == [-0.5, 0.9, 0.4, None] and scored is not None
    assert [trajectory.metrics.get("judge/gate") for trajectory in scored] == [0, 1, 1, None]
    assert len(endpoint.requests) == 1 and "I count 10" not in endpoint.requests[0].messages[1]["content"]
    assert await GateJudge(large, nothing)(group_of(10, 90)) is None


async def test_chains_nest_and_are_judges_of_a_trainer() -> None:
    with scripted_llm(honest) as endpoint:
        ties = TieJudge(judge_at(endpoint), lambda trajectory: number(trajectory) > 50)
        chain = GateJudge(lambda trajectory: number(trajectory) > 5, ties)
        rollout: Any = lambda model, scenario: None  # noqa: E731
        offbook.Trainer(offbook.TrainableModel("agent", base_model="tiny"), rollout, ["one"], judge=chain)
        [kept] = await judged([group_of(1, 10, 20, 60)], chain)
    assert rewards(kept) == pytest.approx([0.0, 0.05, 0.1, 1.0])


def test_a_share_that_would_turn_the_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        TieJudge(nothing, share=1.0)
