"""Where hand-written rollouts belong: as much as gathering, training and logging know of it."""

from __future__ import annotations

import itertools
from typing import Any

import offbook
from offbook.base.types import RolloutPlace
from tests.client.test_train_requests import model_at, rollout
from tests.fakes.scripted_api import Reply, scripted_api

NUMBERS = itertools.count()


async def finished() -> offbook.Trajectory:
    return rollout(f"call-{next(NUMBERS)}", 1)


async def broken() -> offbook.Trajectory:
    raise ValueError("no luck")


async def test_gathered_rollouts_know_their_group_and_their_index_in_it_failed_ones_counted() -> None:
    first, second = await offbook.gather_trajectory_groups(
        [
            offbook.TrajectoryGroup([finished(), broken(), finished()], place=RolloutPlace(scenario="blue", run="r")),
            offbook.TrajectoryGroup([rollout("call-x", 0), finished()], place=RolloutPlace(group="of my own")),
        ],
        max_exceptions=1,
    )
    name = first.place.group
    assert name is not None and name.startswith("group-")
    assert [each.place for each in first] == [
        RolloutPlace(run="r", scenario="blue", group=name, index=index) for index in (0, 2)
    ]
    assert [each.place for each in second] == [RolloutPlace(group="of my own", index=index) for index in (0, 1)]


async def test_what_a_rollout_says_of_its_place_stands() -> None:
    own = RolloutPlace(split="train", scenario="mine")

    async def placed() -> offbook.Trajectory:
        return offbook.Trajectory(reward=1, place=own)

    [group] = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup([placed()], place=RolloutPlace(scenario="s"))]
    )
    [trajectory] = group
    assert (trajectory.place.scenario, trajectory.place.split, trajectory.place.index) == ("mine", "train", 0)


async def test_rollouts_gathered_side_by_side_are_no_group() -> None:
    assert [each.place for each in await offbook.gather_trajectories([finished(), finished()])] == [RolloutPlace()] * 2


def sent(bodies: list[Any]) -> list[tuple[str, RolloutPlace]]:
    records = [record for body in bodies for record in body["trajectories"]]
    return [(record["id"], RolloutPlace.model_validate(record["place"])) for record in records]


async def test_a_train_request_sends_what_it_knows_and_failed_rollouts_have_one_id_for_every_model() -> None:
    gathered = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup([finished(), broken(), finished(), broken()])], max_exceptions=2
    )
    by_hand = offbook.TrajectoryGroup([rollout("call-1", 1), ValueError("x"), rollout("call-2", 0)])
    with scripted_api() as api:
        for name in ("one", "two"):
            model = offbook.TrainableModel(name, base_model="tiny", backend=offbook.RemoteBackend(api.url))
            await model.train([*gathered, by_hand], request_id=f"train-{name}")
        one, two = (sent([body]) for body in api.bodies("/api/trajectories"))
    group = gathered[0].place.group
    assert [place.index for _, place in one] == [0, 2, 1, 3, 0, 1, 2]
    assert [place.group for _, place in one] == [group] * 4 + ["train-one/1"] * 3
    assert {place.split for _, place in one} == {"train"}
    assert [name for name, _ in one[:6]] == [name for name, _ in two[:6]]
    assert one[6][0] != two[6][0]  # this group has no id of its own


async def test_logged_rollouts_have_split_and_step_and_those_that_left_only_an_exception_are_logged_too() -> None:
    loose = rollout("call-1", 1)
    group = offbook.TrajectoryGroup([rollout("call-2", 0), ValueError("x")])
    with scripted_api(lambda request: Reply() if request.path.endswith("/log") else None) as api:
        await model_at(api.url).log([loose, group], split="test", step=4)
        first, second, failed = sent(api.bodies("/api/trajectories"))
    assert first == (loose.id, RolloutPlace(split="test", step=4))
    assert (second[1].group, second[1].index, failed[1].index) == (failed[1].group, 0, 1)
    assert (failed[1].split, failed[1].step) == ("test", 4)
