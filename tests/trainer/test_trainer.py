"""The trainer against a real server: steps, resumption, early ends, failures, evaluation."""

from __future__ import annotations

import asyncio
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbook import (
    TrainableModel,
    TrainConfig,
    Trainer,
    Trajectory,
    TrajectoryGroup,
    capture_auto_trajectory,
    gather_trajectory_groups,
    log_reward,
)
from offbook.base.errors import (
    ConfigError,
    LeakError,
    RolloutError,
    WrongLoopError,
)
from offbook.base.types import RolloutException
from offbook.trainer.evaluate import printing_failures
from offbook.trainer.progress import PlainProgress
from offbook.trainer.report import Stopped

SCENARIOS = [
    {"id": str(number), "prompt": f"say the word {word}"} for number, word in enumerate(("blue", "teal", "pink"))
]
REWARDS = itertools.count()
SMALL: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=1e-3)}


async def rollout(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
    """One call; the reward is the share of vowels in the answer."""
    trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": scenario["prompt"]}])
    answer = await model.openai_client().chat.completions.create(
        model=model.name, messages=trajectory.messages(), max_tokens=8
    )
    trajectory.messages_and_choices.append(answer.choices[0])
    text = answer.choices[0].message.content or ""
    trajectory.reward = sum(letter in "aeiou" for letter in text) / (1 + len(text))
    trajectory.metrics["success"] = float(bool(text))
    return trajectory


async def varied(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
    """The same, but no two rollouts have the same reward: there is always something to train."""
    trajectory = await rollout(model, scenario)
    trajectory.reward = float(next(REWARDS))
    return trajectory


def quiet() -> tuple[PlainProgress, io.StringIO]:
    out = io.StringIO()
    return PlainProgress(Console(file=out, width=400), 9), out


def test_steps_are_a_total_and_a_second_run_goes_on(model: TrainableModel) -> None:
    progress, out = quiet()
    first = Trainer(model, varied, SCENARIOS, eval=SCENARIOS, progress=progress, **SMALL).train(1)
    assert (first.started, first.step, first.stopped) == (0, 1, Stopped.FINISHED)
    assert first.checkpoint is not None
    assert (Path(first.checkpoint) / "adapter_model.safetensors").exists()
    assert [evaluation.step for evaluation in first.evaluations] == [0, 1]
    assert f"The LoRA is in {first.checkpoint}" in out.getvalue()

    second = Trainer(model, varied, SCENARIOS, progress=progress, **SMALL).train(2)
    assert (second.started, second.step, len(second.iterations)) == (1, 2, 1)

    third = Trainer(model, varied, SCENARIOS, progress=progress, **SMALL).train(2)
    assert (third.stopped, third.iterations) == (Stopped.NOTHING_LEFT, ())
    assert "at step 2: nothing is left to train. The LoRA is in" in out.getvalue()
    assert "raise it to continue, or use another name= to start again" in out.getvalue()
    assert out.getvalue().startswith("watch the run: ")


async def test_a_run_after_a_killed_one_waits_for_its_update_and_trains_no_step_too_many(model: TrainableModel) -> None:
    """The client is gone in the middle of its step's stream; the same command is given again at once."""
    groups = await gather_trajectory_groups(
        [TrajectoryGroup([varied(model, scenario) for _ in range(4)]) for scenario in SCENARIOS], pbar_desc=None
    )
    for number, trajectory in enumerate(trajectory for group in groups for trajectory in group):
        trajectory.reward = float(number % 2)
    begun = asyncio.Event()
    killed = asyncio.create_task(model.train(groups, pbar_desc=None, on_event=lambda event: begun.set()))
    await begun.wait()
    killed.cancel()
    progress, out = quiet()
    report = await Trainer(model, varied, SCENARIOS, progress=progress, **SMALL).atrain(1)
    assert (report.started, report.step, report.stopped) == (1, 1, Stopped.NOTHING_LEFT), out.getvalue()
    assert await model.get_step() == 1


def test_a_run_says_that_it_continues_before_a_damaged_checkpoint(model: TrainableModel) -> None:
    report = Trainer(model, varied, SCENARIOS, progress=quiet()[0], **SMALL).train(1)
    assert report.checkpoint is not None
    damaged = Path(report.checkpoint).with_name("0002.damaged-0")  # as the server names what it sets aside at its start
    damaged.mkdir()
    for steps, warned in ((2, True), (3, False)):
        progress, out = quiet()
        Trainer(model, varied, SCENARIOS, progress=progress, **SMALL).train(steps)
        assert (
            f"continues from step 1, since later checkpoints were damaged and are set aside: {damaged}"
            in out.getvalue()
        ) == warned


def test_the_newest_checkpoints_stay_and_so_does_the_best(model: TrainableModel) -> None:
    progress, _ = quiet()
    Trainer(model, varied, SCENARIOS, progress=progress, **SMALL).train(1)
    best = Trajectory(messages_and_choices=[{"role": "user", "content": "x"}], reward=0.9)
    asyncio.run(model.log([best], split="val", step=1))
    report = Trainer(model, varied, SCENARIOS, progress=progress, keep_checkpoints=2, **SMALL).train(4)
    saved = asyncio.run(model.checkpoints())
    assert [state.step for state in saved] == [1, 3, 4] and report.checkpoint == saved[-1].path
    files = [file for file in Path(saved[0].path).iterdir() if file.name != "offbook.json"]
    assert saved[0].size == sum(file.stat().st_size for file in files)
    assert Trainer(model, varied, SCENARIOS, progress=progress, keep_checkpoints=2, **SMALL).train(5).step == 5
    assert [state.step for state in asyncio.run(model.checkpoints())] == [1, 4, 5]


def test_options_may_change_from_step_to_step(model: TrainableModel) -> None:
    progress, _ = quiet()
    options = {**SMALL, "config": lambda step: TrainConfig(learning_rate=1e-3 / step)}
    report = Trainer(model, varied, SCENARIOS, progress=progress, **options).train(2)
    assert [each.metrics["loss/learning_rate"] for each in report.iterations] == [1e-3, 5e-4]


@pytest.mark.parametrize(
    ("reward", "held_out", "verdict"),
    [(1.0, SCENARIOS[:1], Stopped.SOLVED), (1.0, [], Stopped.NO_SIGNAL), (0.5, SCENARIOS[:1], Stopped.NO_SIGNAL)],
)
def test_equal_rewards_train_nothing_and_end_the_run(
    model: TrainableModel, reward: float, held_out: list[dict[str, str]], verdict: Stopped
) -> None:
    """Without a step or an evaluation, even the best reward shows only that the scenarios teach nothing."""
    progress, out = quiet()
    options: dict[str, Any] = SMALL | ({"eval": held_out} if held_out else {})
    trainer = Trainer(
        model, rollout, SCENARIOS, reward=lambda scenario, trajectory: reward, patience=2, progress=progress, **options
    )
    report = trainer.train(5)
    assert (report.step, report.stopped, len(report.iterations)) == (0, verdict, 2)
    assert report.checkpoint is None
    assert "no signal: all rewards of each group are equal" in out.getvalue()


def test_a_gradient_of_zero_is_no_step_and_the_run_says_which_kind_of_no_signal_it_was(
    model: TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    async def certain(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        """The sampler has one token to choose from."""
        trajectory = Trajectory(messages_and_choices=[{"role": "user", "content": scenario["prompt"]}])
        answer = await model.openai_client().chat.completions.create(
            model=model.name, messages=trajectory.messages(), max_tokens=8, extra_body={"top_k": 1}
        )
        trajectory.messages_and_choices.append(answer.choices[0])
        trajectory.reward = float(next(REWARDS))
        return trajectory

    progress, out = quiet()
    report = Trainer(model, certain, SCENARIOS, patience=2, target_reward=1e9, progress=progress, **SMALL).train(5)
    assert (report.step, report.stopped, report.checkpoint) == (0, Stopped.NO_SIGNAL, None)
    assert [each.applied for each in report.iterations] == [False, False]
    assert {each.models[model.name].no_signal for each in report.iterations} == {"zero_gradient"}
    *_, first, second, closing = out.getvalue().splitlines()
    assert first.startswith("step 0/9  iteration 1") and "no signal: the gradient is exactly zero: each of the" in first
    assert second.startswith("step 0/9  iteration 2") and second.endswith("  no signal")
    assert "stopped: for 2 iterations the gradient was exactly zero. Let the policy choose" in closing
    assert caplog.text == "", "the run's own lines say it"


def test_failed_rollouts_stay_unscored_and_the_others_train(model: TrainableModel) -> None:
    turns = iter(range(100))

    async def flaky(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        if next(turns) % 4 == 0:
            raise ValueError("the tool is away")
        return await varied(model, scenario)

    progress, out = quiet()
    report = Trainer(model, flaky, SCENARIOS, progress=progress, **SMALL).train(1)
    assert report.step == 1
    assert report.iterations[0].failed == 2
    assert "2 rollouts failed: 2 x ValueError: the tool is away at test_trainer.py:" in out.getvalue()


def test_a_failed_rollout_is_run_again_when_asked_whether_it_raises_or_returns_its_exception(
    model: TrainableModel,
) -> None:
    turns = iter(range(100))

    async def flaky(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        turn = next(turns)
        if turn == 0:
            raise ValueError("the tool is away")
        failed = RolloutException(type="ValueError", message="away", traceback="")
        return Trajectory(exception=failed) if turn == 1 else await varied(model, scenario)

    report = Trainer(model, flaky, SCENARIOS, retries=1, progress=quiet()[0], **SMALL).train(1)
    assert report.iterations[0].failed == 0
    assert next(turns) == 8 + 2


def test_iterations_without_a_signal_do_not_count_as_steps(model: TrainableModel) -> None:
    rewards = itertools.chain([0.5] * 8, itertools.count())
    trainer = Trainer(
        model, rollout, SCENARIOS, reward=lambda scenario, trajectory: next(rewards), progress=quiet()[0], **SMALL
    )
    report = trainer.train(1)
    assert ([each.applied for each in report.iterations], report.step) == ([False, True], 1)


def test_a_judges_reward_for_a_failed_rollout_does_not_count(model: TrainableModel) -> None:
    turns = iter(range(100))

    async def flaky(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        failed = RolloutException(type="ValueError", message="away", traceback="")
        return Trajectory(exception=failed) if next(turns) == 0 else await rollout(model, scenario)

    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        for trajectory in group:
            trajectory.reward = 0.0 if trajectory.exception else 1.0 + next(REWARDS)
        return group

    report = Trainer(model, flaky, SCENARIOS, judge=judge, progress=quiet()[0], **SMALL).train(1)
    assert (report.step, report.iterations[0].failed) == (1, 1)
    assert report.iterations[0].metrics["trajectories/failed"] == 1
    assert report.iterations[0].reward >= 1.0


async def test_evaluations_are_judged_too_and_decide_which_checkpoint_is_best(model: TrainableModel) -> None:
    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        for trajectory in group:
            trajectory.reward = float(next(REWARDS))
        return group

    async def unscored(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        trajectory = await rollout(model, scenario)
        trajectory.reward = None
        return trajectory

    trainer = Trainer(model, unscored, SCENARIOS, judge=judge, eval=SCENARIOS, progress=quiet()[0], **SMALL)
    report = await trainer.atrain(1)
    assert [each.scored for each in report.evaluations] == [3, 3]
    logged = await (await model.api()).logs(model.name)
    assert [each.metrics["val/reward"] for each in logged] == [each.reward for each in report.evaluations]


def test_rollouts_without_a_call_are_counted_and_the_others_train(model: TrainableModel) -> None:
    turns = iter(range(100))

    async def sometimes(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        if next(turns) % 4 == 0:
            return Trajectory(captured=True, reward=float(next(REWARDS)))
        return await varied(model, scenario)

    report = Trainer(model, sometimes, SCENARIOS, progress=quiet()[0], **SMALL).train(1)
    assert report.step == 1
    assert report.iterations[0].metrics["trajectories/without_targets"] == 2


async def test_a_rollout_that_returns_no_trajectory_says_so(model: TrainableModel) -> None:
    async def forgetful(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        return None  # type: ignore[return-value]

    with pytest.raises(RolloutError, match="the rollout returned None; it must return a Trajectory"):
        await Trainer(model, forgetful, SCENARIOS, progress=quiet()[0], **SMALL).atrain(1)


def test_a_run_is_solved_by_the_mean_over_all_its_last_batches(model: TrainableModel) -> None:
    def by_scenario(scenario: Any, trajectory: Trajectory) -> float:
        return float(scenario["id"] != "0")

    options: dict[str, Any] = {**SMALL, "scenarios_per_step": 1}
    trainer = Trainer(model, rollout, SCENARIOS, reward=by_scenario, patience=3, progress=quiet()[0], **options)
    assert trainer.train(5).stopped == Stopped.NO_SIGNAL


def test_a_step_without_any_scored_rollout_is_an_error_that_names_the_causes(model: TrainableModel) -> None:
    async def broken(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        raise ValueError("the tool is away")

    async def broken_with_a_reward(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        failed = RolloutException(type="ValueError", message="the tool is away", traceback="")
        return Trajectory(exception=failed, reward=0.0)

    for rollouts in (broken, broken_with_a_reward):
        with pytest.raises(RolloutError, match="8 x ValueError: the tool is away"):
            Trainer(model, rollouts, SCENARIOS, progress=quiet()[0], **SMALL).train(1)


def test_an_evaluation_warns_of_the_rollouts_that_its_mean_leaves_out(
    model: TrainableModel, caplog: pytest.LogCaptureFixture
) -> None:
    async def sometimes(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        if scenario["id"] == "1":
            raise KeyError("city")
        return await rollout(model, scenario)

    found = Trainer(model, sometimes, SCENARIOS).evaluate(SCENARIOS)
    assert (found.scored, found.failed) == (2, 1)
    assert "1 of 3 rollouts of the evaluation failed and are left out of its mean reward: 1 x KeyError" in caplog.text
    caplog.clear()
    with printing_failures():
        found = Trainer(model, sometimes, SCENARIOS).evaluate(SCENARIOS)
    assert caplog.text == "" and "1 rollout failed: 1 x KeyError" in str(found)


def test_a_greedy_evaluation_gives_the_same_twice(model: TrainableModel) -> None:
    trainer = Trainer(model, rollout, SCENARIOS, eval=SCENARIOS, progress=quiet()[0])
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first.reward == second.reward
    assert first.temperature == 0.0


async def test_a_sync_method_in_a_running_loop_names_its_twin(model: TrainableModel) -> None:
    trainer = Trainer(model, rollout, SCENARIOS)
    with pytest.raises(WrongLoopError, match="await atrain"):
        trainer.train(1)
    with pytest.raises(WrongLoopError, match="await aevaluate"):
        trainer.evaluate()


async def test_a_cancelled_run_says_how_to_go_on(model: TrainableModel) -> None:
    begun = asyncio.Event()

    async def endless(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    progress, out = quiet()
    run = asyncio.create_task(Trainer(model, endless, SCENARIOS, progress=progress, **SMALL).atrain(3))
    await asyncio.wait_for(begun.wait(), 120)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (
        "interrupted after step 0 of 3: run the same again to continue from there. Waiting for: 8 rollouts"
        in out.getvalue()
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("group_size", 1, "group_size: a whole number of at least 2 is needed, got 1"),
        ("timeout", 0, "timeout: seconds above 0"),
        ("patience", 0, "patience"),
        ("eval", [], "eval: at least one scenario"),
        ("config", {"learning_rate": 1e-3}, "config: a TrainConfig, or a function"),
        ("learning_rate", 1e-3, "no option 'learning_rate'"),
        ("timeout", "5", "timeout: seconds above 0 are needed, got '5'"),
        ("target_reward", float("nan"), "target_reward: a finite number is needed, got nan"),
        ("eval_every", 5, "eval_every=5 needs scenarios to evaluate on"),
        ("reward", 0.5, r"reward: a function \(scenario, trajectory\) -> number is needed, got float 0.5"),
    ],
)
def test_a_wrong_option_is_named(option: str, value: object, message: str) -> None:
    model = TrainableModel(name="agent", base_model="tiny")
    with pytest.raises(ConfigError, match=message):
        Trainer(model, rollout, SCENARIOS, **{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -3, 2.5, "5"])
async def test_steps_that_are_no_count_are_refused(steps: object) -> None:
    model = TrainableModel(name="agent", base_model="tiny")
    with pytest.raises(ConfigError, match="steps: a whole number of at least 1 is needed, got"):
        await Trainer(model, rollout, SCENARIOS).atrain(steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature.*got -1.0"),
        ({"temperature": float("nan")}, "nan"),
        ({"rollouts": 0}, "got 0"),
    ],
)
async def test_an_evaluation_that_no_sampler_could_follow_is_refused(options: dict[str, Any], message: str) -> None:
    model = TrainableModel(name="agent", base_model="tiny")
    with pytest.raises(ConfigError, match=message):
        await Trainer(model, rollout, SCENARIOS).aevaluate(SCENARIOS, **options)


def test_a_schedule_that_gives_no_config_is_refused_by_the_step(model: TrainableModel) -> None:
    options = {**SMALL, "config": lambda step: {"learning_rate": 1e-3}}
    with pytest.raises(
        ConfigError, match=r"config: the function gave dict .* for step 1; it must return a TrainConfig"
    ):
        Trainer(model, varied, SCENARIOS, progress=quiet()[0], **options).train(1)


def test_a_loss_that_reads_no_rewards_is_refused_at_once_and_from_a_schedule() -> None:
    model, config = TrainableModel(name="agent", base_model="tiny"), TrainConfig(loss="cross_entropy")
    with pytest.raises(ConfigError, match=r"loss='cross_entropy' ignores rewards.*set min_reward="):
        Trainer(model, rollout, SCENARIOS, config=config)
    with pytest.raises(ConfigError, match="ignores rewards"):
        Trainer(model, rollout, SCENARIOS, config=lambda step: config).options.config_of(1)


def test_a_call_past_the_capture_ends_the_run_at_once(model: TrainableModel) -> None:
    async def leaking(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        raise LeakError("POST https://api.example.com/v1/chat/completions left at app.py:3")

    with pytest.raises(LeakError, match=r"left at app.py:3"):
        Trainer(model, leaking, SCENARIOS, retries=2, progress=quiet()[0], **SMALL).train(1)


async def test_what_was_logged_inside_a_rollout_adds_to_the_reward(model: TrainableModel) -> None:
    async def agent() -> None:
        log_reward(0.25, key="format")

    async def logging(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        return await capture_auto_trajectory(agent())

    trainer = Trainer(model, logging, SCENARIOS, reward=lambda scenario, trajectory: 0.5)
    found = await trainer.aevaluate(SCENARIOS)
    assert (found.reward, found.metrics["reward/format"]) == (0.75, 0.25)


async def test_evaluations_in_between_come_after_every_so_many_steps(model: TrainableModel) -> None:
    trainer = Trainer(model, varied, SCENARIOS, eval=SCENARIOS, eval_every=2, progress=quiet()[0], **SMALL)
    assert [each.step for each in (await trainer.atrain(5)).evaluations] == [0, 2, 4, 5]


def test_scenarios_of_one_id_are_refused() -> None:
    model = TrainableModel(name="agent", base_model="tiny")
    with pytest.raises(ConfigError, match="these appear twice: 1"):
        Trainer(model, rollout, [{"id": 1}, {"id": "1"}])
