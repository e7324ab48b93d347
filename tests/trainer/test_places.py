"""Every rollout of a run is found on the server by its place: trained, evaluated, failed, unscored or dropped."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from offbook import (
    LocalBackend,
    TrainableModel,
    TrainConfig,
    Trainer,
    Trajectory,
    TrajectoryGroup,
    auto_trajectory,
    capture_auto_trajectory,
)
from offbook.base.errors import ConfigError, RolloutError
from offbook.base.types import new_id
from offbook.base.wire import TrajectoryQuery, TrajectoryRecord

SCENARIOS = [{"id": word, "prompt": f"say the word {word}"} for word in ("blue", "teal")]
SMALL: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=1e-3)}


class Rollouts:
    """Captured rollouts that call each model once, with rewards 0, 1, 2, ...; those whose number is in `raising` raise
    after it."""

    def __init__(self, *raising: int, reward: bool = True) -> None:
        self.raising, self.reward, self.numbers = raising, reward, itertools.count()

    async def __call__(self, models: Any, scenario: dict[str, str]) -> Trajectory:
        number = next(self.numbers)

        async def agent() -> None:
            for model in models if isinstance(models, tuple) else (models,):
                await model.openai_client().chat.completions.create(
                    model=model.name, messages=[{"role": "user", "content": scenario["prompt"]}], max_tokens=4
                )
            auto_trajectory(required=True).reward = float(number) if self.reward else None

        trajectory = await capture_auto_trajectory(agent())
        if number in self.raising:
            raise ValueError("the tool is away")
        return trajectory


async def listed(model: TrainableModel, **filters: Any) -> tuple[TrajectoryRecord, ...]:
    """Those of a model, in pages of three."""
    query = TrajectoryQuery(model=model.name, limit=3, **filters)
    api, records = await model.api(), tuple[TrajectoryRecord, ...]()
    while True:
        page = await api.trajectories(query)
        records += page.trajectories
        if page.next is None:
            return records
        query = query.model_copy(update={"after": page.next})


def groups_of(records: tuple[TrajectoryRecord, ...]) -> dict[str, list[int]]:
    """The indexes of each group."""
    groups: dict[str, list[int]] = {}
    for record in records:
        assert record.place.group is not None and record.place.index is not None
        groups.setdefault(record.place.group, []).append(record.place.index)
    return {name: sorted(indexes) for name, indexes in groups.items()}


async def test_two_models_in_one_run_are_both_found(local_backend: LocalBackend) -> None:
    planner, writer = (
        TrainableModel(name=new_id(name), base_model="tiny", backend=local_backend) for name in ("planner", "writer")
    )
    trainer = Trainer([planner, writer], Rollouts(3), SCENARIOS, eval=SCENARIOS, **SMALL)
    report = await trainer.atrain(1)
    trained = await listed(planner, run=report.run, split="train")
    assert list(groups_of(trained).values()) == [[0, 1, 2, 3]] * 2
    assert Counter((each.place.scenario, each.place.step) for each in trained) == {("blue", 0): 4, ("teal", 0): 4}
    evaluated = await listed(planner, run=report.run, split="val")
    assert sorted((str(each.place.scenario), each.place.step) for each in evaluated) == [
        ("blue", 0),
        ("blue", 1),
        ("teal", 0),
        ("teal", 1),
    ]
    assert await listed(planner, run=report.run) == await listed(writer, run=report.run)
    (lost,) = await listed(writer, run=report.run, failed=True)
    assert (lost.reward, lost.exception and lost.exception.message) == (None, "the tool is away")
    assert await listed(writer, group=lost.place.group, scored=False) == (lost,)


async def test_rollouts_of_which_none_is_scored_stay_with_their_places(model: TrainableModel) -> None:
    trainer = Trainer(model, Rollouts(1, 6, reward=False), SCENARIOS, run="silent run", **SMALL)
    with pytest.raises(RolloutError, match="no rollout was scored"):
        await trainer.atrain(1)
    with pytest.raises(RolloutError, match="no rollout was scored"):
        await trainer.aevaluate(SCENARIOS)
    assert len(await listed(model, run="silent run", scored=False)) == 8 + 2
    training = await listed(model, run="silent run", split="train")
    assert list(groups_of(training).values()) == [[0, 1, 2, 3]] * 2
    assert len([each for each in training if each.exception]) == 2
    assert len(await listed(model, run="silent run", split="val", step=0)) == 2


async def test_an_evaluation_is_a_run_with_a_group_for_each_scenario(model: TrainableModel) -> None:
    trainer = Trainer(model, Rollouts(1), SCENARIOS)
    await trainer.aevaluate(SCENARIOS, temperature=1.0, rollouts=3)
    await trainer.aevaluate(SCENARIOS)
    sampled, greedy = await listed(model, split="val-sampled"), await listed(model, split="val")
    assert list(groups_of(sampled).values()) == [[0, 1, 2]] * 2
    assert list(groups_of(greedy).values()) == [[0]] * 2
    assert len({each.place.run for each in sampled}) == len({each.place.run for each in greedy}) == 1
    assert {each.place.run for each in sampled}.isdisjoint(each.place.run for each in greedy)
    assert [each.place.index for each in sampled if each.exception] == [1]


async def test_what_a_judge_drops_is_kept_unscored_and_so_is_all_when_it_ends_the_run(model: TrainableModel) -> None:
    async def judge(group: TrajectoryGroup) -> TrajectoryGroup | None:
        if group.metadata["scenario_id"] == "teal":
            return None
        for number, trajectory in enumerate(group):
            trajectory.reward = float(number)
        return TrajectoryGroup(group.trajectories[:3])  # without its place, and without one of them

    async def broken(group: TrajectoryGroup) -> TrajectoryGroup | None:
        raise ConfigError("judge_model: no such model")

    rollouts = Rollouts(reward=False)
    report = await Trainer(model, rollouts, SCENARIOS, judge=judge, run="judged", **SMALL).atrain(1)
    count = len(report.iterations)  # more than one where all rollouts of "blue" sampled the same
    assert list(groups_of(await listed(model, run="judged")).values()) == [[0, 1, 2, 3]] * 2 * count
    assert [each.reward for each in await listed(model, run="judged", scenario="teal")] == [None] * 4 * count
    assert {each.reward for each in await listed(model, run="judged", scenario="blue")} == {0.0, 1.0, 2.0, None}
    with pytest.raises(ConfigError, match="no such model"):
        await Trainer(model, rollouts, SCENARIOS, judge=broken, run="broken", **SMALL).atrain(2)
    assert len(await listed(model, run="broken", step=1, scored=False)) == 8


async def test_a_run_that_goes_on_under_its_name_is_one_run_and_each_other_one_its_own(model: TrainableModel) -> None:
    for steps in (1, 2):
        report = await Trainer(model, Rollouts(), SCENARIOS, run="nightly", **SMALL).atrain(steps)
        assert report.run == "nightly"
    assert Counter(each.place.step for each in await listed(model, run="nightly")) == {0: 8, 1: 8}
    reports = [await Trainer(model, Rollouts(), SCENARIOS, **SMALL).atrain(steps) for steps in (3, 4)]
    assert len({report.run for report in reports}) == 2


@pytest.mark.parametrize("name", ["", "x" * 501, "a\0b", 7])
def test_a_name_that_rollouts_cannot_be_listed_by_is_refused_before_the_first(name: Any) -> None:
    model = TrainableModel(name="agent", base_model="tiny")
    with pytest.raises(ConfigError, match="run: 1 to 500 characters are needed"):
        Trainer(model, Rollouts(), SCENARIOS, run=name)
    if len(str(name)) > 1:
        with pytest.raises(ConfigError, match="scenarios: the id of a scenario: 1 to 500 characters"):
            Trainer(model, Rollouts(), [{"id": name, "prompt": "hi"}])
