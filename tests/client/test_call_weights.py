"""Weights of calls on their way to the server, and what is refused by name before it leaves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import offbook
from offbook.base.errors import ConfigError
from offbook.client.rollouts.records import as_json
from tests.fakes.scripted_api import scripted_api


def rollout(call_id: str, reward: float = 1.0, **fields: Any) -> offbook.Trajectory:
    mark = {"offbook": {"call_id": call_id, "index": 0}}
    message = {"role": "assistant", "content": "yes"}
    choice = Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message, **mark})
    return offbook.Trajectory(messages_and_choices=[choice], reward=reward, **fields)


def model_at(url: str) -> offbook.TrainableModel:
    return offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend(url))


async def test_weights_and_thrown_away_calls_travel_with_their_trajectory() -> None:
    first = rollout("call-1", weights={"call-1": 0.5}, unused=["call-1"])
    second = offbook.Trajectory(captured=True, reward=0.0)
    second.weights["call-2"] = 0
    with scripted_api() as api:
        await model_at(api.url).train([offbook.TrajectoryGroup([first, second, rollout("call-3")])])
        [finished] = api.bodies("/api/trajectories")
    sent = [(record["weights"], record["unused"]) for record in finished["trajectories"]]
    assert sent == [({"call-1": 0.5}, ["call-1"]), ({"call-2": 0.0}, []), ({}, [])]


@pytest.mark.parametrize("weight", [-0.5, math.nan, math.inf])
def test_a_trajectory_takes_no_weight_that_is_negative_or_not_finite(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"weights\['call-9'\] must be a finite number of at least 0, got {weight!r}"):
        offbook.Trajectory(weights={"call-1": 1.0, "call-9": weight})


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-0.5, r"must be a finite number of at least 0 \(0 leaves the call out\), got -0.5"),
        (math.nan, "got nan"),
        (math.inf, "got inf"),
        ("much", "must be a number, got 'much'"),
    ],
)
async def test_a_weight_set_later_is_refused_with_trajectory_and_call(weight: Any, message: str) -> None:
    bad = rollout("call-9")
    bad.weights["call-9"] = weight
    with scripted_api() as api:
        where = rf"trajectory {bad.id} \(group 0, rollout 1\): weights\['call-9'\] "
        with pytest.raises(ConfigError, match=where + f".*{message}" if message.startswith("got") else where + message):
            await model_at(api.url).train([offbook.TrajectoryGroup([rollout("call-1"), bad])])
        assert api.bodies("/api/trajectories") == []


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
async def test_a_number_that_json_cannot_give_back_is_refused_deep_inside_metadata(number: float) -> None:
    bad = rollout("call-2", metadata={"board": {"rows": [[1.0, number]]}})
    group = offbook.TrajectoryGroup([rollout("call-1"), bad])
    strange = offbook.TrajectoryGroup([rollout("call-1")], metadata={"board": [{"x": number}]})
    with scripted_api() as api:
        model = model_at(api.url)
        with pytest.raises(ConfigError, match=rf"{bad.id} .*metadata\['board'\] is not JSON .*not JSON compliant"):
            await model.train([group])
        with pytest.raises(ConfigError, match=r"group 0: metadata\['board'\] is not JSON"):
            await model.train([strange])
        assert api.bodies("/api/trajectories") == []


@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_a_models_state_with_such_a_number_is_refused_by_name(number: float) -> None:
    with scripted_api() as api:
        with pytest.raises(ValueError, match="best"):
            await model_at(api.url).overwrite_state({"epoch": 1, "best": {"rewards": [number]}})
        assert [asked for asked in api.asked if asked.path.endswith("/state")] == []
    with pytest.raises(ConfigError, match=r"state\['best'\] is not JSON"):
        as_json({"best": {"rewards": [number]}}, "state")
