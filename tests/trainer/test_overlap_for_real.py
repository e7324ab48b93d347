"""Overlap with the real engines: what the server recorded says how old the calls were that each step was made of."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from rich.console import Console

from offbook import LocalBackend, TrainableModel, TrainConfig, Trainer, Trajectory, auto_trajectory
from offbook.base.errors import CaptureError
from offbook.base.types import new_id
from offbook.client.rollouts.capture import capture_auto_trajectory
from offbook.trainer.progress import PlainProgress

SCENARIOS = [{"id": "train", "prompt": "say the word blue"}]
HELD_OUT = [{"id": f"eval {word}", "prompt": f"say the word {word}"} for word in ("teal", "pink")]
GROUP = 4
STEPS = 4


class Agent:
    """Rollouts of two turns, captured; it remembers their trajectories in order of begin."""

    def __init__(self) -> None:
        self.trained: list[Trajectory] = []
        self.evaluated: list[Trajectory] = []
        self.rewards = itertools.count()

    async def __call__(self, given: Any, scenario: dict[str, str]) -> Trajectory:
        models: tuple[TrainableModel, ...] = given if isinstance(given, tuple) else (given,)

        async def agent() -> None:
            own = auto_trajectory(required=True)
            (self.evaluated if scenario["id"].startswith("eval") else self.trained).append(own)
            messages: list[Any] = [{"role": "user", "content": scenario["prompt"]}]
            for model in (*models, *models):
                answer = await model.openai_client().chat.completions.create(
                    model=model.name, messages=messages, max_tokens=6, temperature=1.5
                )  # hot, so that rollouts differ: a group of equal ones is dropped, and another is rolled out
                messages += [
                    {"role": "assistant", "content": answer.choices[0].message.content or ""},
                    {"role": "user", "content": "again"},
                ]
            own.reward = float(next(self.rewards))

        return await capture_auto_trajectory(agent())


def options(most: int) -> dict[str, Any]:
    progress = PlainProgress(Console(file=io.StringIO(), width=400), STEPS)
    config = TrainConfig(learning_rate=1e-3, overlap=True, max_staleness=most)
    return {"config": config, "group_size": GROUP, "progress": progress}


async def steps_of_calls(model: TrainableModel, trajectories: list[Trajectory]) -> list[set[int]]:
    """The steps of each rollout's calls of this model, as the server recorded them."""
    api = await model.api()
    found = [(await api.trajectory(each.id)).calls for each in trajectories]
    return [{call.step for call in calls if call.model == model.name} for calls in found]


@pytest.mark.parametrize("most", [1, 2])
async def test_no_call_is_older_than_allowed_when_it_is_trained(model: TrainableModel, most: int) -> None:
    agent = Agent()
    report = await Trainer(model, agent, SCENARIOS, **options(most)).atrain(STEPS)
    steps = await steps_of_calls(model, agent.trained)
    assert (report.step, len(steps)) == (STEPS, STEPS * GROUP)
    ages = [max(n - min(each) for each in steps[n * GROUP : (n + 1) * GROUP]) for n in range(STEPS)]
    assert max(ages) <= most
    assert ages[1] == 1  # the second rollouts began beside the first update
    told = [each.metrics["staleness/max"] for each in report.iterations]
    assert all(age <= said <= most for age, said in zip(ages, told, strict=True))
    assert report.iterations[1].metrics["calls/stale_share"] > 0
    assert report.iterations[0].metrics["importance/mean"] == pytest.approx(1, abs=1e-3)


async def test_each_evaluation_is_of_one_step(model: TrainableModel) -> None:
    agent = Agent()
    report = await Trainer(model, agent, SCENARIOS, eval=HELD_OUT, eval_every=2, **options(2)).atrain(STEPS)
    assert [each.step for each in report.evaluations] == [0, 2, 4]
    assert await steps_of_calls(model, agent.evaluated) == [{0}, {0}, {2}, {2}, {4}, {4}]


async def test_several_models_overlap_and_a_second_run_goes_on(local_backend: LocalBackend) -> None:
    team = [TrainableModel(new_id(name), base_model="tiny", backend=local_backend) for name in ("planner", "writer")]
    agent = Agent()
    for total in (1, 3):
        report = await Trainer(team, agent, SCENARIOS, **options(1)).atrain(total)
        assert [each.step for each in report.models.values()] == [total, total]
    for model in team:
        steps = await steps_of_calls(model, agent.trained)
        ages = [max(n - min(each) for each in steps[n * GROUP : (n + 1) * GROUP]) for n in range(3)]
        assert (len(steps), ages[1], max(ages) <= 1) == (3 * GROUP, 0, True)  # the second run began afresh


async def test_an_update_is_applied_though_the_rollouts_beside_it_end_the_run(model: TrainableModel) -> None:
    agent = Agent()

    async def rollout(given: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        if len(agent.trained) >= GROUP:
            raise CaptureError("a call was not captured")
        return await agent(given, scenario)

    with pytest.raises(CaptureError):
        await Trainer(model, rollout, SCENARIOS, **options(1)).atrain(STEPS)
    assert await model.get_step() == 1
    report = await Trainer(model, agent, SCENARIOS, **options(1)).atrain(2)
    assert (report.started, report.step) == (1, 2)
