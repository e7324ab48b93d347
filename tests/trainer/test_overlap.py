"""Overlap: what begins beside what, in which order, and what is left when something fails. The server is scripted."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice
from rich.console import Console

from offbook import TrainableModel, TrainConfig, Trainer, Trajectory
from offbook.base.errors import ConfigError, LeakError, TrainError
from offbook.trainer.progress import PlainProgress
from offbook.trainer.report import Stopped, TrainReport
from tests.fakes.scripted_training import ScriptedTraining, scripted_training

SCENARIOS = [{"id": "train"}]
HELD_OUT = [{"id": f"eval {number}"} for number in range(3)]
GROUP = 4
Rollout = Callable[[TrainableModel, dict[str, str]], Awaitable[Trajectory]]


@pytest.fixture
def server() -> Iterator[ScriptedTraining]:
    with scripted_training() as training:
        yield training


class Rollouts:
    """Rollouts without a call: `began[i]` is the server's step at each begin in iteration i, `evaluated` those of an
    evaluation. `at_begin` is awaited with the iteration's number."""

    def __init__(self, server: ScriptedTraining, rewards: Iterator[float] | None = None) -> None:
        self.server = server
        self.rewards = rewards or itertools.count()
        self.trained = 0
        self.began: list[int] = []
        self.evaluated: list[int] = []
        self.ended: list[str] = []
        self.at_begin: Callable[[int], Awaitable[None]] | None = None

    async def __call__(self, model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        if scenario["id"].startswith("eval"):
            self.evaluated.append(self.server.steps["agent"])
            return finished(0.0)
        number, place = divmod(self.trained, GROUP)
        self.trained += 1
        if place == 0:
            self.began.append(self.server.steps["agent"])
        try:
            if self.at_begin is not None:
                await self.at_begin(number)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return finished(float(next(self.rewards)))


def finished(reward: float) -> Trajectory:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    mark = {"offbook": {"call_id": f"call-{next(CALLS)}", "index": 0}}
    return Trajectory(messages_and_choices=[Choice.model_validate(choice | mark)], reward=reward)


CALLS = itertools.count()


class Said(PlainProgress):
    """What was said, and an event at the first line that contains `awaited`."""

    def __init__(self, awaited: str = "nothing") -> None:
        self.out = io.StringIO()
        super().__init__(Console(file=self.out, width=400), 9)
        self._awaited, self.heard = awaited, asyncio.Event()

    def say(self, line: str) -> None:
        super().say(line)
        if self._awaited in line:
            self.heard.set()


def trainer(server: ScriptedTraining, rollout: Rollout, staleness: int = 1, **options: Any) -> Trainer:
    """`staleness` 0: without overlap."""
    config = TrainConfig(overlap=True, max_staleness=staleness) if staleness else TrainConfig()
    options = {"config": config, "progress": Said(), "group_size": GROUP} | options
    return Trainer(server.model(), rollout, SCENARIOS, **options)


def staleness(report: TrainReport) -> list[tuple[float, float]]:
    return [(each.metrics["staleness/mean"], each.metrics["staleness/max"]) for each in report.iterations]


async def within(seconds: float, event: Any) -> None:
    """Wait for an event of a thread."""
    assert await asyncio.to_thread(event.wait, seconds), f"nothing within {seconds} s"


def nothing_is_left() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("most", [1, 2, 3])
async def test_rollouts_begin_before_the_updates_of_those_before_them_have_ended(
    server: ScriptedTraining, most: int
) -> None:
    steps = 6
    rollouts = Rollouts(server)
    server.close(*range(1, steps + 1))

    async def open_the_oldest(number: int) -> None:
        if number >= most:
            server.gates[
                number - most + 1
            ].set()  # no update ends before the last rollouts that may run beside it begin
        if number == steps - 1:
            for update in range(1, steps + 1):
                server.gates[update].set()

    rollouts.at_begin = open_the_oldest
    report = await trainer(server, rollouts, most).atrain(steps)
    assert rollouts.began == [max(0, number - most) for number in range(steps)]
    assert [high for _, high in staleness(report)] == [min(number, most) for number in range(steps)]
    assert (report.step, report.stopped, rollouts.trained) == (steps, Stopped.FINISHED, steps * GROUP)


async def test_rollouts_that_would_be_too_old_wait_for_the_update(server: ScriptedTraining) -> None:
    rollouts = Rollouts(server)
    server.close(1)
    run = asyncio.create_task(trainer(server, rollouts).atrain(3))
    await within(60, server.arrived[1])
    await within(60, server.kept[2])  # the second rollouts have ended, too, and stay on the server
    for _ in range(100):
        await asyncio.sleep(0)
    assert (rollouts.trained, len(server.requests)) == (2 * GROUP, 1)
    server.gates[1].set()
    await run
    assert rollouts.trained == 3 * GROUP


async def test_a_rollout_that_begins_after_the_update_is_not_stale(server: ScriptedTraining) -> None:
    rollouts, progress = Rollouts(server), Said("step 1/9")
    server.close(1)

    async def second_lets_the_update_end(number: int) -> None:
        if rollouts.trained == GROUP + 2:
            server.gates[1].set()
            await asyncio.wait_for(progress.heard.wait(), 60)

    rollouts.at_begin = second_lets_the_update_end
    report = await trainer(server, rollouts, concurrency=1, progress=progress).atrain(2)
    assert staleness(report) == [(0, 0), (0.5, 1)]


async def test_without_overlap_no_rollout_begins_during_an_update(server: ScriptedTraining) -> None:
    rollouts = Rollouts(server)
    report = await trainer(server, rollouts, 0).atrain(4)
    assert rollouts.began == [0, 1, 2, 3]
    assert "staleness/max" not in report.iterations[-1].metrics


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 2])
async def test_an_evaluation_is_of_one_step_and_comes_when_it_would_without_overlap(
    server: ScriptedTraining, most: int, every: int
) -> None:
    rollouts = Rollouts(server)
    report = await trainer(server, rollouts, most, eval=HELD_OUT, eval_every=every).atrain(5)
    steps = [0, 1, 2, 3, 4, 5] if every == 1 else [0, 2, 4, 5]
    assert [each.step for each in report.evaluations] == steps
    assert rollouts.evaluated == [step for step in steps for _ in HELD_OUT]
    assert rollouts.trained == 5 * GROUP
    if most:
        assert 1 <= max(high for _, high in staleness(report)) <= most  # evaluating each step leaves overlap, too


async def test_a_resumed_run_makes_the_steps_that_are_left(server: ScriptedTraining) -> None:
    server.steps["agent"] = 3
    rollouts = Rollouts(server)
    report = await trainer(server, rollouts, 2).atrain(5)
    assert (report.started, report.step, rollouts.trained) == (3, 5, 2 * GROUP)
    assert server.ended == [report.run], "the dashboard shows that it is over"


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("patience", [1, 3])
async def test_rewards_without_a_signal_end_the_run_after_as_many_rollouts_as_without_overlap(
    server: ScriptedTraining, most: int, patience: int
) -> None:
    rewards = itertools.chain(range(GROUP), [1.0] * GROUP, range(GROUP), itertools.repeat(0.5))
    rollouts = Rollouts(server, rewards)
    server.without_signal = {2, *range(4, 20)}
    report = await trainer(server, rollouts, most, patience=patience).atrain(9)
    expected = (Stopped.SOLVED, 1, 2) if patience == 1 else (Stopped.NO_SIGNAL, 2, 6)
    assert (report.stopped, report.step, len(report.iterations)) == expected
    assert rollouts.trained == expected[2] * GROUP


async def test_where_rewards_differ_and_yet_nothing_is_trained_the_run_ends_with_what_has_begun(
    server: ScriptedTraining,
) -> None:
    rollouts = Rollouts(server)
    server.without_signal = set(range(1, 20))
    report = await trainer(server, rollouts, patience=2).atrain(9)
    assert (report.stopped, len(report.iterations), rollouts.trained) == (Stopped.NO_SIGNAL, 3, 3 * GROUP)


async def test_a_schedule_may_switch_overlap_on(server: ScriptedTraining) -> None:
    asked: list[int] = []

    def schedule(step: int) -> TrainConfig:
        asked.append(step)
        return TrainConfig(overlap=step > 2, max_staleness=2)

    rollouts = Rollouts(server)
    server.close(2, 3)

    async def open_gates(number: int) -> None:
        if number == 3:
            server.gates[2].set()
            server.gates[3].set()

    rollouts.at_begin = open_gates
    report = await trainer(server, rollouts, config=schedule).atrain(4)
    assert rollouts.began == [0, 1, 1, 1]
    assert "staleness/max" not in report.iterations[1].metrics
    assert [report.iterations[at].metrics["staleness/max"] for at in (2, 3)] == [1, 2]
    assert asked == [1, 2, 3, 4]


async def test_two_models_overlap_alike(server: ScriptedTraining) -> None:
    rollouts: Any = Rollouts(server)
    server.close(1, 2)  # each model's first

    async def open_gates(number: int) -> None:
        if number == 1:
            server.gates[1].set()
            server.gates[2].set()

    rollouts.at_begin = open_gates
    config = TrainConfig(overlap=True)
    team = [server.model("agent"), server.model("writer")]
    report = await Trainer(team, rollouts, SCENARIOS, config=config, group_size=GROUP, progress=Said()).atrain(3)
    assert [each.step for each in report.models.values()] == [3, 3]
    assert rollouts.began[:2] == [0, 0]
    ages = [[made.metrics["staleness/max"] for made in each.models.values()] for each in report.iterations]
    assert ages[:2] == [[0, 0], [1, 1]]


async def forever(number: int) -> None:
    await asyncio.Event().wait()


async def test_an_update_that_fails_cancels_the_rollouts_beside_it_and_is_the_error(server: ScriptedTraining) -> None:
    rollouts = Rollouts(server)
    server.close(1)
    server.failing = {1}

    async def open_and_stay(number: int) -> None:
        if number == 1:
            server.gates[1].set()
            await forever(number)

    rollouts.at_begin = open_and_stay
    with pytest.raises(TrainError, match="NaN in a gradient") as caught:
        await asyncio.wait_for(trainer(server, rollouts).atrain(5), 60)
    assert (rollouts.ended, len(server.requests), server.ended) == (["cancelled"] * GROUP, 1, [])
    assert caught.value.__notes__ == ["not trained: 4 finished rollouts; their calls stay on the server"]
    assert nothing_is_left()


async def test_rollouts_that_wait_for_an_update_that_fails_stay_on_the_server(server: ScriptedTraining) -> None:
    rollouts = Rollouts(server)
    server.close(1)
    server.failing = {1}
    progress = Said()
    run = asyncio.create_task(trainer(server, rollouts, progress=progress).atrain(5))
    await within(60, server.arrived[1])
    await within(60, server.kept[2])
    server.gates[1].set()
    with pytest.raises(TrainError) as caught:
        await asyncio.wait_for(run, 60)
    assert caught.value.__notes__ == ["not trained: 8 finished rollouts; their calls stay on the server"]
    assert server.api is not None
    kept = [body["trajectories"] for body in server.api.bodies("/api/trajectories")]
    assert "an error ends the run" not in progress.out.getvalue()  # nothing was awaited
    assert [4, 5, 6, 7] in [[each["reward"] for each in rollouts] for rollouts in kept]
    assert len(server.requests) == 1
    assert nothing_is_left()


@pytest.mark.parametrize("most", [1, 2])
async def test_a_rollout_that_ends_the_run_lets_the_updates_under_way_end_first(
    server: ScriptedTraining, most: int
) -> None:
    progress = Said("an error ends the run, when the update under way has ended")
    rollouts = Rollouts(server)
    server.close(1)

    async def leak(number: int) -> None:
        if number == most:
            raise LeakError("POST https://api.example.com left at app.py:3")

    rollouts.at_begin = leak
    run = asyncio.create_task(trainer(server, rollouts, most, progress=progress).atrain(5))
    await asyncio.wait_for(progress.heard.wait(), 60)
    assert not run.done()
    server.gates[1].set()
    with pytest.raises(LeakError, match=r"left at app.py:3") as caught:
        await asyncio.wait_for(run, 60)
    assert not hasattr(caught.value, "__notes__")
    assert server.steps["agent"] == most  # also the update that had waited for its turn
    assert f"step {most}/9  iteration {most}  reward" in progress.out.getvalue()
    assert nothing_is_left()


async def test_when_both_fail_the_rollouts_error_tells_of_the_updates(server: ScriptedTraining) -> None:
    progress = Said("an error ends the run")
    rollouts = Rollouts(server)
    server.close(1)
    server.failing = {1}

    async def leak(number: int) -> None:
        if number == 1:
            raise LeakError("left at app.py:3")

    rollouts.at_begin = leak
    run = asyncio.create_task(trainer(server, rollouts, progress=progress).atrain(5))
    await asyncio.wait_for(progress.heard.wait(), 60)
    server.gates[1].set()
    with pytest.raises(LeakError) as caught:
        await asyncio.wait_for(run, 60)
    [update, rest] = caught.value.__notes__
    assert update.startswith("The update under way failed as well: TrainError: step of 'agent' was not applied")
    assert rest.startswith("not trained: 4 finished rollouts")


async def test_a_cancelled_run_leaves_no_task_behind(server: ScriptedTraining) -> None:
    progress, rollouts = Said(), Rollouts(server)
    server.close(1)
    begun = asyncio.Event()

    async def stay(number: int) -> None:
        if number == 1:
            begun.set()
            await forever(number)

    rollouts.at_begin = stay
    run = asyncio.create_task(trainer(server, rollouts, progress=progress).atrain(5))
    await asyncio.wait_for(begun.wait(), 60)
    await within(60, server.arrived[1])
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(run, 60)
    assert rollouts.ended == ["cancelled"] * GROUP
    assert nothing_is_left()
    assert "interrupted after step 0 of 5 (the server may still apply the update that was under way): run the same" in (
        progress.out.getvalue()
    )
    assert "Waiting for: training step 1 of agent, 4 rollouts with step 0\n" in progress.out.getvalue()


async def test_the_lines_tell_how_old_rollouts_were(server: ScriptedTraining) -> None:
    progress = Said()
    await trainer(server, Rollouts(server), 2, progress=progress).atrain(2)
    watch, *_, last, _ = progress.out.getvalue().splitlines()
    assert watch.startswith("watch the run: http://127.0.0.1:")
    assert "  staleness 1.00, max 1  taught -  tokens" in last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance_cap": None}, "overlap=True needs importance_cap"),
        ({"max_staleness": 0}, "overlap=True with max_staleness=0"),
        ({"max_staleness": 63}, "TrainConfig.max_staleness.*got 63"),
    ],
)
def test_overlap_without_its_correction_or_without_room_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.parse(overlap=True, **options)
