"""Rewards that are logged between the calls of a rollout, from `log_reward` to the learner."""

from __future__ import annotations

import math

import pytest

import offbook
from offbook.base.errors import ConfigError
from offbook.base.types import call_ref, new_id
from offbook.client.rollouts.capture import LOGGED
from tests.fakes.scripted_api import scripted_api


@pytest.fixture
def model(local_backend: offbook.LocalBackend) -> offbook.TrainableModel:
    return offbook.TrainableModel(name=new_id("earner"), base_model="tiny", backend=local_backend)


async def earning(model: offbook.TrainableModel, place: int, rewards: tuple[float, float]) -> offbook.Trajectory:
    """Two calls, each followed by its reward. Every rollout asks something else, so that answers differ."""
    ids: list[str] = []

    async def agent() -> None:
        offbook.log_reward(0.5, key="early")
        for turn, reward in enumerate(rewards):
            asked = {"role": "user", "content": f"where is order {place}{turn}?"}
            answer = await model.openai_client().chat.completions.create(
                model=model.name,
                messages=[asked],  # type: ignore[list-item]
                max_tokens=6,
                temperature=1.5,
            )
            if (ref := call_ref(answer.choices[0])) is not None:
                ids.append(ref.call_id)
            offbook.log_reward(reward / 2, key="turn")
            offbook.log_reward(reward / 2, key="turn")

    trajectory = await offbook.capture_auto_trajectory(agent())
    trajectory.reward = 0.5 + sum(rewards)
    assert trajectory.call_rewards == dict(zip(ids, rewards, strict=True))
    assert trajectory.metrics[f"{LOGGED}turn"] == pytest.approx(sum(rewards))
    return trajectory


async def test_rollouts_of_equal_rewards_are_trained_by_what_each_call_earned(model: offbook.TrainableModel) -> None:
    earned = ((1.0, 0.0), (0.0, 1.0), (0.75, 0.25), (0.5, 0.5))
    rollouts = [await earning(model, place, rewards) for place, rewards in enumerate(earned)]
    plain = await model.train([offbook.TrajectoryGroup(rollouts)])
    assert (plain.applied, plain.no_signal) == (False, "equal_rewards")
    result = await model.train([offbook.TrajectoryGroup(rollouts)], call_rewards=True, learning_rate=1e-3)
    assert (result.applied, result.step) == (True, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, "much"])
async def test_a_call_reward_that_is_no_finite_number_is_refused_with_trajectory_and_call(value: float | str) -> None:
    bad = offbook.Trajectory(captured=True, reward=0.0)
    bad.call_rewards["call-9"] = value  # type: ignore[assignment]
    with scripted_api() as api:
        model = offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend(api.url))
        with pytest.raises(ConfigError, match=rf"{bad.id} .*call_rewards\['call-9'\] must be"):
            await model.train([offbook.TrajectoryGroup([bad])])
        assert api.bodies("/api/trajectories") == []
