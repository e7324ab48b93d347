"""Judges: what is refused before the first rollout, what while it is asked, and what becomes of its group."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import AsyncMock

import pytest

from offbook import TrainableModel, Trainer, Trajectory, TrajectoryGroup
from offbook.base.errors import ConfigError, MissingExtraError, RolloutError
from offbook.base.types import RolloutException
from offbook.trainer.judging import judged

MODEL = TrainableModel(name="agent", base_model="tiny")
FAILED = RolloutException(type="ValueError", message="away", traceback="")


async def rollout(model: TrainableModel, scenario: Any) -> Trajectory:
    raise AssertionError("no rollout is run here")


async def ones(group: TrajectoryGroup, scale: float = 1.0) -> TrajectoryGroup:
    for trajectory in group:
        trajectory.reward = scale
    return group


class Scorer:
    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        return await ones(group)

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        return await ones(group)

    def score_now(self, group: TrajectoryGroup) -> TrajectoryGroup:
        return group


@functools.wraps(ones)
def decorated(*args: Any, **options: Any) -> Any:
    return ones(*args, **options)


def plain(group: TrajectoryGroup) -> TrajectoryGroup:
    return group


def groups(*names: str) -> list[TrajectoryGroup]:
    return [TrajectoryGroup([Trajectory(reward=0.5)], metadata={"scenario_id": name}) for name in names]


@pytest.mark.parametrize(
    "judge",
    [
        ones,
        Scorer(),
        Scorer().score,
        functools.partial(ones, scale=1.0),
        lambda group: ones(group),
        decorated,
        AsyncMock(side_effect=ones),
    ],
)
async def test_whatever_can_be_awaited_with_a_group_is_a_judge(judge: Any) -> None:
    Trainer(MODEL, rollout, ["a scenario"], judge=judge)
    [kept] = await judged(groups("only"), judge)
    assert kept.trajectories[0].reward == 1.0


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Scorer, "a class: pass an instance"),
        (plain, r"got function <function plain .*>, which is not async"),
        (Scorer().score_now, "which is not async"),
    ],
)
def test_what_is_no_judge_is_refused_before_the_first_rollout_with_the_signature_that_is_wanted(
    judge: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"judge: .*{message}.*async def judge\\(group: TrajectoryGroup\\)"):
        Trainer(MODEL, rollout, ["a scenario"], judge=judge)


@pytest.mark.parametrize(("answer", "kind"), [([1.0], "list"), (0.5, "float"), (Trajectory(reward=1.0), "Trajectory")])
async def test_a_judge_that_returns_something_else_is_an_error_by_name(answer: object, kind: str) -> None:
    async def odd(group: TrajectoryGroup) -> object:
        return answer

    with pytest.raises(ConfigError, match=rf"odd returned {kind} .*not a group.*TrajectoryGroup \| None"):
        await judged(groups("only"), odd)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without being awaited"):
        await judged(groups("only"), lambda group: group)  # type: ignore[arg-type, return-value]


async def test_a_judge_that_fails_is_asked_once_more_and_then_its_group_is_dropped() -> None:
    asked: list[str] = []

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup | None:
        name = str(group.metadata["scenario_id"])
        asked.append(name)
        if name == "never" or (name == "second" and asked.count(name) == 1):
            raise TimeoutError("no answer")
        return None if name == "none" else await ones(group)

    names = ("first", "second", "never", "none")
    kept = await judged(groups(*names), judge)
    assert [group.trajectories[0].reward for group in kept] == [1.0, 1.0, None, None]
    assert [asked.count(name) for name in names] == [1, 2, 2, 1]
    assert kept[2].logs == ["the judge failed: TimeoutError: no answer"]
    assert kept[3].logs == ["the judge gave no scores"]


@pytest.mark.parametrize("reward", ["good", float("nan"), [1.0]])
async def test_a_reward_that_is_no_number_is_a_failure_of_the_judge(reward: Any) -> None:
    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        group.trajectories[0].reward = reward
        return group

    [kept] = await judged(groups("only"), judge)
    assert kept.trajectories[0].reward is None
    assert "the judge failed: RolloutError" in kept.logs[0]


@pytest.mark.parametrize("fault", [MissingExtraError("litellm", "judge"), ConfigError("judge_model: no such model")])
async def test_what_every_group_would_meet_is_raised_at_once(fault: Exception) -> None:
    asked: list[TrajectoryGroup] = []

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        asked.append(group)
        raise fault

    with pytest.raises(type(fault)):
        await judged(groups("only"), judge)
    assert len(asked) == 1


async def test_a_judge_is_not_shown_groups_of_which_every_rollout_failed() -> None:
    asked: list[TrajectoryGroup] = []

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        asked.append(group)
        return await ones(group)

    lost = TrajectoryGroup([Trajectory(exception=FAILED)], exceptions=[ValueError("away")])
    half = TrajectoryGroup([Trajectory(exception=FAILED), Trajectory()])
    kept = await judged([lost, half], judge)
    assert asked == [half]
    assert [[trajectory.reward for trajectory in group] for group in kept] == [[None], [None, 1.0]]


async def test_a_run_in_which_the_judge_scored_nothing_says_why(model: TrainableModel) -> None:
    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        raise TimeoutError("no answer")

    async def silent(model: TrainableModel, scenario: Any) -> Trajectory:
        return Trajectory()

    trainer = Trainer(model, silent, ["a scenario"], judge=judge, group_size=3)
    with pytest.raises(RolloutError, match=r"3 x the judge failed: TimeoutError: no answer"):
        await trainer.atrain(1)
