"""Judges made of judges and reward functions."""

from __future__ import annotations

from statistics import pstdev
from typing import Any

import pytest

import offbook
from offbook.base.errors import ConfigError, RolloutError
from offbook.contracts import Judge
from offbook.rewards import AverageJudge, GateJudge, TieJudge
from offbook.testing import attempts_shown, fails, scripted_llm
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


async def test_several_judges_are_averaged_and_their_disagreement_is_a_metric() -> None:
    group = group_of(1, 2, logs=["begun"])
    scored = await AverageJudge([scores(0.2, 1.0), scores(0.6, 1.0), scores(0.1, 0.7)])(group)
    assert scored is not None and rewards(scored) == pytest.approx([0.3, 0.9]) and rewards(group) == [None, None]
    first, second = scored
    assert first.metrics == pytest.approx(
        {
            "judge/score_1": 0.2,
            "judge/score_2": 0.6,
            "judge/score_3": 0.1,
            "judge/disagreement": pstdev([0.2, 0.6, 0.1]),
        }
    )
    assert scored.metrics["judge/disagreement"] == pytest.approx(
        (pstdev([0.2, 0.6, 0.1]) + pstdev([1.0, 1.0, 0.7])) / 2
    )
    assert scored.metrics["judge/tie"] == 0 and scored.logs == ["begun", "judged", "judged", "judged"]
    assert second.logs == ["scored 1.0", "scored 1.0", "scored 0.7"]


async def test_one_judge_without_scores_leaves_the_whole_group_unscored() -> None:
    assert await AverageJudge([scores(0.2, 1.0), nothing])(group_of(1, 2)) is None
    with scripted_llm(honest) as well, scripted_llm([fails(400, "no")]) as ill:
        [kept] = await judged([group_of(1, 2)], AverageJudge([judge_at(well), judge_at(ill)]))
    assert rewards(kept) == [None, None] and kept.metrics["judge/dropped"] == 1


async def test_a_failed_rollout_stays_unscored_among_several_judges() -> None:
    group = offbook.TrajectoryGroup([said("I count 10"), said("I count 90", exception=FAILED), said("I count 30")])
    with scripted_llm(honest) as endpoint:
        scored = await AverageJudge([judge_at(endpoint), judge_at(endpoint, seed=1)])(group)
    assert rewards(scored) == [0.1, None, 0.3] and scored is not None
    assert scored.metrics["judge/disagreement"] == 0 and scored.trajectories[0].metrics["ruler_score"] == 0.1


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
        panel = AverageJudge([judge_at(endpoint), judge_at(endpoint, seed=1)])
        chain = GateJudge(lambda each: number(each) > 5, TieJudge(panel, lambda each: number(each) > 50))
        rollout: Any = lambda model, scenario: None  # noqa: E731
        offbook.Trainer(offbook.TrainableModel("agent", base_model="tiny"), rollout, ["one"], judge=chain)
        [kept] = await judged([group_of(1, 10, 20, 60)], chain)
    assert rewards(kept) == pytest.approx([0.0, 0.05, 0.1, 1.0])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AverageJudge([nothing]), "at least two judges"),
        (lambda: TieJudge(nothing, share=1.0), "between 0 and 1"),
    ],
)
def test_chains_that_cannot_be_are_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
