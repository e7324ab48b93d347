"""Rollouts as Ray tasks: what a worker is told and returns, and a real cluster of which a worker is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offbook import TrainableModel, TrainConfig, Trainer, Trajectory, capture_auto_trajectory
from offbook.base.errors import ConfigError, LeakError
from offbook.base.types import RecordedError
from offbook.client.rollouts.capture import at_temperature, completion_limit, completions_limited, forced_temperature
from offbook.llms.ledger import SpendingTotals, budget, spending
from offbook_ray.ray_runner import RayRunner, RemoteResult, RemoteRollout, pickled, remote_result
from tests.on_ray.local_cluster import ray_cluster

SCENARIOS = [{"id": str(number), "prompt": f"say {number}"} for number in range(3)]


@pytest.fixture(scope="module", autouse=True)
def ray_installed(require: Callable[[bool, str], None]) -> None:
    require(find_spec("ray") is not None, "pip install -r requirements/test.txt")


def in_worker(rollout: Any, model: object = None, scenario: object = None) -> RemoteResult:
    """What the worker of a task returns, in this process."""
    job = RemoteRollout(rollout, model, scenario, forced_temperature(), completion_limit())
    return asyncio.run(remote_result(pickled(job)))


def test_a_worker_has_the_evaluations_temperature_and_the_limit_and_returns_costs_and_trajectory() -> None:
    async def rollout(model: str, scenario: int) -> Trajectory:
        spending().record("judge", SpendingTotals(questions=1, cost=0.5))
        settings = {"temperature": forced_temperature(), "limit": completion_limit()}
        return Trajectory(reward=1.0, metadata={"model": model, "scenario": scenario, **settings})

    with at_temperature(0.0), completions_limited(7), budget() as spent:
        result = in_worker(rollout, "agent", 3)
    assert result.value.metadata == {"model": "agent", "scenario": 3, "temperature": 0.0, "limit": 7}
    assert result.spent == {"judge": SpendingTotals(questions=1, cost=0.5)}
    assert (result.failed, result.fault) == (None, None)
    assert spent.total.questions == 1  # this is the same process; a task's own is another


def test_a_rollout_runs_in_the_trainers_folder_where_the_machine_has_it(tmp_path: Path) -> None:
    async def rollout(model: object, scenario: object) -> Trajectory:
        return Trajectory(metadata={"folder": os.getcwd()})

    def ran_in(folder: Path) -> object:
        job = RemoteRollout(rollout, None, None, None, None, str(folder))
        return asyncio.run(remote_result(pickled(job))).value.metadata["folder"]

    with contextlib.chdir(Path.cwd()):
        assert ran_in(tmp_path) == str(tmp_path)
        assert ran_in(tmp_path / "elsewhere") == str(tmp_path)  # as before


def test_a_failure_keeps_its_type_and_traceback_and_a_common_fault_is_raised_as_itself() -> None:
    async def fails(model: object, scenario: object) -> Trajectory:
        raise KeyError("the agent's own line")

    async def leaks(model: object, scenario: object) -> Trajectory:
        raise LeakError("a request bypassed the capture")

    failed = in_worker(fails).failed
    assert failed is not None
    assert (failed.type, "the agent's own line" in failed.message) == ("KeyError", True)
    assert failed.traceback.rstrip().splitlines()[-2].strip() == 'raise KeyError("the agent\'s own line")'
    assert isinstance(in_worker(leaks).fault, LeakError)


def test_what_cannot_be_pickled_is_named_with_what_to_do() -> None:
    lock = threading.Lock()

    async def rollout(model: object, scenario: object) -> Trajectory:
        with lock:
            return Trajectory()

    with pytest.raises(ConfigError, match=r"cannot be sent to a worker .*create clients and connections inside"):
        in_worker(rollout)


@pytest.mark.parametrize(
    ("option", "value"), [("num_cpus", -1), ("num_gpus", "two"), ("max_retries", -2), ("resources", {"tpu": -1})]
)
def test_a_wrong_amount_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"RayRunner: .*{'tpu' if option == 'resources' else option}"):
        RayRunner(**{option: value})  # type: ignore[arg-type]  # what a user may write


def test_a_model_is_pickled_once_its_server_is_known(model: TrainableModel) -> None:
    with pytest.raises(ConfigError, match="not registered yet"):
        pickled(RemoteRollout(print, model, None, None, None))  # type: ignore[arg-type]

    async def called(copy: TrainableModel, scenario: object) -> Trajectory:
        answer = await copy.openai_client().chat.completions.create(
            model=copy.name, messages=[{"role": "user", "content": "blue"}], max_tokens=4
        )
        return Trajectory(messages_and_choices=[{"role": "user", "content": "blue"}, answer.choices[0]], reward=1.0)

    asyncio.run(model.register())
    trajectory = in_worker(called, model).value
    assert trajectory.call_refs()


@dataclass(frozen=True)
class Counting:
    """A rollout that counts in the trainer's process."""

    seen: list[int] = field(default_factory=list[int])

    async def __call__(self, model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        self.seen.append(os.getpid())
        return await one_call(model, scenario)

    def __reduce__(self) -> tuple[Any, ...]:
        return Counting, ()

    def collected(self) -> list[int]:
        return self.seen

    def collect(self, collected: list[int]) -> None:
        self.seen.extend(collected)


async def one_call(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
    """One call, in a captured trajectory."""

    async def ask() -> None:
        await model.openai_client().chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": scenario["prompt"]}], max_tokens=12
        )

    trajectory = await capture_auto_trajectory(ask())
    trajectory.reward = random.random()  # so that each group has something to learn
    return trajectory


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray on this machine, small."""
    with ray_cluster(2) as ray:
        yield ray


@pytest.mark.slow("real Ray")
def test_a_killed_worker_costs_no_rollout_and_only_its_own_run_again(
    cluster: Any, model: TrainableModel, tmp_path: Path
) -> None:
    async def rollout(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        with Path(scenario["id"]).open("a") as starts:  # in the trainer's folder
            starts.write(f"{os.getpid()}\n")
        trajectory = await counting(model, scenario)
        if scenario["id"] == "1" and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)  # after its call, before its end
        return trajectory

    counting = Counting()
    trainer = Trainer(
        model, rollout, SCENARIOS, runner=RayRunner(num_cpus=0.5), group_size=4, scenarios_per_step=3,
        config=TrainConfig(learning_rate=1e-3),
    )  # fmt: skip
    with contextlib.chdir(tmp_path):
        report = trainer.train(1)
    (iteration,) = report.iterations
    assert (report.step, iteration.failed) == (1, 0)
    starts = {name: (tmp_path / name).read_text().split() for name in ("0", "1", "2")}
    assert {name: len(pids) for name, pids in starts.items()} == {"0": 4, "1": 5, "2": 4}
    assert str(os.getpid()) not in {pid for pids in starts.values() for pid in pids}


@pytest.mark.slow("real Ray")
def test_counts_come_back_and_failures_and_timeouts_are_data(cluster: Any, model: TrainableModel) -> None:
    counting = Counting()

    async def sometimes(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
        if scenario["id"] == "0":
            await asyncio.sleep(600)
        if scenario["id"] == "1":
            raise ZeroDivisionError("of the agent")
        return await one_call(model, scenario)

    evaluation = Trainer(model, counting, SCENARIOS, runner="ray").evaluate(SCENARIOS)
    assert (evaluation.scored, evaluation.failed) == (3, 0)
    assert len(counting.seen) == 3
    assert os.getpid() not in counting.seen
    trainer = Trainer(model, sometimes, SCENARIOS, runner=RayRunner(num_cpus=1), timeout=60)
    evaluation = trainer.evaluate(SCENARIOS)
    assert (evaluation.scored, evaluation.failed) == (1, 2)
    assert {kind.key[0] for kind in evaluation.failures} == {"TimeoutError", "ZeroDivisionError"}
    again = Trainer(model, one_call, SCENARIOS, runner=RayRunner(num_cpus=1), timeout=60).evaluate(SCENARIOS)
    assert again.scored == 3  # the cancelled tasks hold no processor


@pytest.mark.slow("real Ray")
def test_a_cluster_that_is_too_small_is_named(cluster: Any, model: TrainableModel) -> None:
    with pytest.raises(ConfigError, match="a rollout reserves 64 CPU, and the cluster has 2"):
        Trainer(model, one_call, SCENARIOS, runner=RayRunner(num_cpus=64)).evaluate(SCENARIOS)


def test_an_error_of_another_process_is_its_record() -> None:
    async def fails(model: object, scenario: object) -> Trajectory:
        raise KeyError("x")

    failed = in_worker(fails).failed
    assert failed is not None
    assert str(RecordedError(failed)) == "KeyError: 'x'"
