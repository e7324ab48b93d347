"""Several models in one run: each learns from its own calls in the same rollouts, by a LoRA of its own."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice
from rich.console import Console

from offbook import (
    History,
    LocalBackend,
    Model,
    TrainableModel,
    TrainConfig,
    Trainer,
    Trajectory,
    auto_trajectory,
    capture_auto_trajectory,
)
from offbook.base.errors import ConfigError, RolloutError
from offbook.base.types import new_id
from offbook.tracing.jsonl import JsonlSink
from offbook.trainer.models import StepOutcome
from offbook.trainer.progress import PlainProgress
from offbook.trainer.report import Stopped
from tests.fakes.scripted_training import scripted_training

Team = tuple[TrainableModel, ...]
Rollout = Callable[[Team, dict[str, str]], Awaitable[Trajectory]]
SCENARIOS = [{"id": word, "prompt": f"say the word {word}"} for word in ("blue", "teal")]
SMALL: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 1, "config": TrainConfig(learning_rate=1e-3)}
REWARDS = itertools.count()


@pytest.fixture
def planner(local_backend: LocalBackend) -> TrainableModel:
    return TrainableModel(name=new_id("planner"), base_model="tiny", backend=local_backend)


@pytest.fixture
def writer(local_backend: LocalBackend) -> TrainableModel:
    return TrainableModel(name=new_id("writer"), base_model="tiny", backend=local_backend)


async def ask(model: Model, text: str) -> Choice:
    answer = await model.openai_client().chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": text}], max_tokens=6, temperature=1.5
    )  # hot, so that rollouts differ: equal ones have no gradient
    return answer.choices[0]


def calling(*places: int, reward: Callable[[], float] = lambda: float(next(REWARDS))) -> Rollout:
    """A captured rollout that calls the models at these places, in order."""

    async def rollout(models: Team, scenario: dict[str, str]) -> Trajectory:
        async def agent() -> None:
            for place in places:
                await ask(models[place], scenario["prompt"])
            auto_trajectory(required=True).reward = reward()

        return await capture_auto_trajectory(agent())

    return rollout


def quiet() -> tuple[PlainProgress, io.StringIO]:
    out = io.StringIO()
    return PlainProgress(Console(file=out, width=2000), 9), out


def test_two_models_become_two_loras_each_from_its_own_calls(
    planner: TrainableModel, writer: TrainableModel, tmp_path: Path
) -> None:
    progress, out = quiet()
    sinks = [JsonlSink(tmp_path)]
    report = Trainer(
        [planner, writer], calling(0, 1, 1), SCENARIOS, eval=SCENARIOS, progress=progress, sinks=sinks, **SMALL
    ).train(1)
    assert (report.model, report.step, report.stopped) == (planner.name, 1, Stopped.FINISHED)
    assert {name: (each.started, each.step) for name, each in report.models.items()} == {
        planner.name: (0, 1),
        writer.name: (0, 1),
    }
    loras = [Path(each.checkpoint or "") for each in report.models.values()]
    assert (
        len({lora / "adapter_model.safetensors" for lora in loras if (lora / "adapter_model.safetensors").exists()})
        == 2
    )
    [iteration] = report.iterations
    calls = {name: made.metrics["calls/trained"] for name, made in iteration.models.items()}
    assert calls == {planner.name: 4, writer.name: 8}
    assert iteration.metrics == iteration.models[planner.name].metrics
    said = out.getvalue()
    assert f"{writer.name}: step 1" in said
    assert f"The LoRAs are in {loras[0]} ({planner.name}), {loras[1]} ({writer.name})" in said
    [step] = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert step["metrics"][f"{writer.name}/calls/trained"] == 8
    assert [each.steps for each in report.evaluations] == [
        {planner.name: 0, writer.name: 0},
        {planner.name: 1, writer.name: 1},
    ]


async def test_an_evaluation_is_logged_with_every_model_at_its_own_step(
    planner: TrainableModel, writer: TrainableModel
) -> None:
    await Trainer([writer], calling(0), SCENARIOS, progress=quiet()[0], **SMALL).atrain(1)
    found = await Trainer([planner, writer], calling(0, 1), SCENARIOS, eval=SCENARIOS).aevaluate()
    assert (found.step, found.steps) == (0, {planner.name: 0, writer.name: 1})
    for model, step in ((planner, 0), (writer, 1)):
        [logged] = await (await model.api()).logs(model.name)
        assert (logged.step, logged.metrics["val/reward"]) == (step, found.reward)
        assert len(logged.trajectory_ids) == 2


def test_a_model_that_has_made_its_steps_is_trained_no_further(planner: TrainableModel, writer: TrainableModel) -> None:
    Trainer(
        planner, lambda model, scenario: calling(0)((model,), scenario), SCENARIOS, progress=quiet()[0], **SMALL
    ).train(1)
    report = Trainer([planner, writer], calling(0, 1), SCENARIOS, progress=quiet()[0], **SMALL).train(2)
    assert [[made.outcome for made in each.models.values()] for each in report.iterations] == [
        [StepOutcome.TRAINED, StepOutcome.TRAINED],
        [StepOutcome.DONE, StepOutcome.TRAINED],
    ]
    assert [each.step for each in report.models.values()] == [2, 2]
    again = Trainer([planner, writer], calling(0, 1), SCENARIOS, progress=quiet()[0], **SMALL).train(2)
    assert again.stopped == Stopped.NOTHING_LEFT


def test_a_model_that_is_called_now_and_then_waits_for_it_and_the_run_goes_on(
    planner: TrainableModel, writer: TrainableModel
) -> None:
    progress, out = quiet()
    turns = itertools.count()

    async def rollout(models: Team, scenario: dict[str, str]) -> Trajectory:
        return await calling(*((0,) if next(turns) < 4 else (0, 1)))(models, scenario)

    report = Trainer([planner, writer], rollout, SCENARIOS, progress=progress, **SMALL).train(1)
    assert [each.models[writer.name].outcome for each in report.iterations] == [
        StepOutcome.NO_CALLS,
        StepOutcome.TRAINED,
    ]
    assert report.stopped == Stopped.FINISHED
    assert f"warning: {writer.name} was not trained in this iteration:" in out.getvalue()
    assert f"their calls went to {planner.name}" in out.getvalue()


def test_a_model_that_is_never_called_ends_the_run_after_patience_by_name(
    planner: TrainableModel, writer: TrainableModel
) -> None:
    progress, out = quiet()
    report = Trainer([planner, writer], calling(0), SCENARIOS, patience=2, progress=progress, **SMALL).train(1)
    assert (report.stopped, len(report.iterations)) == (Stopped.NO_CALLS, 3)
    assert [each.step for each in report.models.values()] == [1, 0]
    assert f"{writer.name} had no call in any rollout that counts" in out.getvalue()


def test_no_signal_for_all_models_ends_the_run_after_patience(planner: TrainableModel, writer: TrainableModel) -> None:
    trainer = Trainer(
        [planner, writer], calling(0, 1, reward=lambda: 0.5), SCENARIOS, patience=2, progress=quiet()[0], **SMALL
    )
    report = trainer.train(3)
    assert (report.stopped, len(report.iterations)) == (Stopped.NO_SIGNAL, 2)


def test_an_iteration_in_which_no_model_is_called_is_an_error_that_names_each(
    planner: TrainableModel, writer: TrainableModel, local_backend: LocalBackend
) -> None:
    other = TrainableModel(name=new_id("other"), base_model="tiny", backend=local_backend)

    async def rollout(models: Team, scenario: dict[str, str]) -> Trajectory:
        return await calling(0)((other,), scenario)

    with pytest.raises(
        RolloutError, match=f"(?s){planner.name} was not called.*{writer.name} was not called.*{other.name}"
    ):
        Trainer([planner, writer], rollout, SCENARIOS, progress=quiet()[0], **SMALL).train(1)


async def by_hand(models: Team, scenario: dict[str, str]) -> Trajectory:
    """Choices that are kept: one of the first model, one of the second as a further history."""
    first, second = await ask(models[0], scenario["prompt"]), await ask(models[1], scenario["prompt"])
    said = {"role": "user", "content": scenario["prompt"]}
    return Trajectory(
        messages_and_choices=[said, first],
        additional_histories=[History(messages_and_choices=[said, second])],
        reward=float(next(REWARDS)),
    )


def test_choices_kept_by_hand_train_the_model_that_gave_each(planner: TrainableModel, writer: TrainableModel) -> None:
    report = Trainer([planner, writer], by_hand, SCENARIOS, progress=quiet()[0], **SMALL).train(1)
    assert [made.metrics["calls/trained"] for made in report.iterations[0].models.values()] == [4, 4]


async def test_models_on_several_servers_are_refused(planner: TrainableModel) -> None:
    with scripted_training() as elsewhere:
        writer = elsewhere.model()
        with pytest.raises(ConfigError, match="all models of a Trainer need one server"):
            await Trainer([planner, writer], by_hand, SCENARIOS, progress=quiet()[0], **SMALL).atrain(1)


async def test_a_choice_of_another_endpoint_is_refused_because_no_one_knows_whose_it_is(
    planner: TrainableModel, writer: TrainableModel
) -> None:
    async def rollout(models: Team, scenario: dict[str, str]) -> Trajectory:
        foreign = Choice.model_validate(
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "blue"}}
        )
        return Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}, foreign], reward=1.0)

    with pytest.raises(ConfigError, match="keeps a choice of another endpoint"):
        await Trainer([planner, writer], rollout, SCENARIOS, progress=quiet()[0], **SMALL).atrain(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"a TrainableModel, or a sequence of them, is needed, got \[\]"),
        ("agent", "got 'agent'"),
        ([TrainableModel(name="a", base_model="tiny"), "b"], "'b'"),
        ([TrainableModel(name="a", base_model="tiny"), TrainableModel(name="a", base_model="tiny")], "a appears twice"),
    ],
)
def test_models_of_another_kind_or_of_one_name_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(given, calling(0), SCENARIOS)
