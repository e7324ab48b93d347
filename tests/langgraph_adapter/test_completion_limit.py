"""`max_completion_tokens`: how long an answer of the policy may be, where the app sets no smaller limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from offbook import TrainableModel, Trainer, Trajectory, capture_auto_trajectory
from offbook.base.errors import ConfigError
from offbook.testing import ScriptedServer
from offbook_langgraph import capture, trainable
from tests.langgraph_adapter.kinds.apps import own_model


def lengths(gateway: ScriptedServer, since: int) -> list[int | None]:
    """The limits of the calls that the sampler received, whichever field they are in."""
    found = gateway.sampler.received[since:]
    return [body.get("max_completion_tokens") or body.get("max_tokens") for body in found]


@pytest.mark.parametrize(
    ("of_app", "of_call", "of_capture", "expected"),
    [
        (None, None, None, 1024),
        (None, None, 2000, 2000),
        (33, None, None, 33),
        (5000, None, None, 1024),
        (5000, None, 6000, 5000),
        (None, 40, 200, 40),
        (None, 400, 200, 200),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_the_smallest_limit_wins(
    stand_in: TrainableModel,
    obedient: ScriptedServer,
    of_app: int | None,
    of_call: int | None,
    of_capture: int | None,
    expected: int,
    streamed: bool,
) -> None:
    since = len(obedient.sampler.received)
    model = own_model(max_tokens=of_app)
    options: dict[str, Any] = {} if of_call is None else {"max_tokens": of_call}
    with capture(stand_in, max_completion_tokens=of_capture):
        list(model.stream("hi", **options)) if streamed else model.invoke("hi", **options)
    assert lengths(obedient, since) == [expected]


def test_that_of_the_run_goes_before_that_of_the_app_s_wrapping(
    stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    def reward(scenario: Any, output: Any) -> float:
        return 1.0

    plain = trainable(own_model(), model=stand_in, reward=reward)
    wrapped = trainable(own_model(), model=stand_in, reward=reward, max_completion_tokens=70)
    since = len(obedient.sampler.received)
    plain.evaluate(["hi"])
    plain.evaluate(["hi"], max_completion_tokens=60)
    wrapped.evaluate(["hi"])
    wrapped.evaluate(["hi"], max_completion_tokens=80)
    assert lengths(obedient, since) == [1024, 60, 70, 80]


@pytest.mark.parametrize(("own", "expected"), [({}, 90), ({"max_tokens": 50}, 50), ({"max_tokens": 5000}, 90)])
def test_the_calls_of_a_rollout_written_by_hand(
    stand_in: TrainableModel, obedient: ScriptedServer, own: dict[str, Any], expected: int
) -> None:
    async def rollout(model: TrainableModel, scenario: Any) -> Trajectory:
        async def asks() -> None:
            messages: Any = [{"role": "user", "content": "hi"}]
            await model.openai_client().chat.completions.create(model=model.name, messages=messages, **own)

        trajectory = await capture_auto_trajectory(asks())
        trajectory.reward = 1.0
        return trajectory

    since = len(obedient.sampler.received)
    Trainer(stand_in, rollout, ["hi"], eval=["hi"], max_completion_tokens=90).evaluate()
    assert lengths(obedient, since) == [expected]


def test_where_the_context_has_less_room_the_room_is_the_limit(model: TrainableModel) -> None:
    with capture(model, max_completion_tokens=10**6) as trajectory:
        own_model().invoke("what is the size of box 4821?")

    async def made() -> int:
        return len((await (await model.api()).trajectory(trajectory.id)).calls)

    assert asyncio.run(made()) == 1


def test_a_limit_that_is_none_is_refused(stand_in: TrainableModel) -> None:
    for value in (0, -1, 1.5, "9"):
        wrong: Any = value
        for refused in (capture, trainable(own_model(), model=stand_in, reward="logged").train):
            given: Any = stand_in if refused is capture else ["hi"]
            with pytest.raises(ConfigError, match=f"max_completion_tokens: a whole number .* got {wrong!r}"):
                refused(given, max_completion_tokens=wrong)
        with pytest.raises(ConfigError, match="max_completion_tokens: a whole number"):
            trainable(own_model(), model=stand_in, max_completion_tokens=wrong)
