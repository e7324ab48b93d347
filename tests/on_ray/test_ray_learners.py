"""A team of which one learner is placed by a real Ray cluster of this machine: it trains as one learner, and whoever is
killed ends the step and is replaced at the next."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from offbook.base.config import TrainConfig
from offbook.base.server_options import EngineOptions
from offbook.engine.protocol import LEARNER_MODULE, Event, Failed, Progressed, Trained
from offbook.server.base_model import find
from offbook.server.training.learner_client import LearnerClient
from tests.engine.learner.jobs import command, random_groups
from tests.on_ray.local_cluster import ray_cluster

pytestmark = pytest.mark.slow("real Ray")
CONFIG = TrainConfig(learning_rate=1e-2, kl_coef=0.05, epochs=4, minibatches=2, row_tokens=64)
MARK = "OFFBOOK_TEST_PROCESSES"
"""Environment variable that all processes of this module have."""


@pytest.fixture(scope="module", autouse=True)
def cluster(require: Callable[[bool, str], None]) -> Iterator[None]:
    """Ray on this machine, small."""
    require(find_spec("ray") is not None, "pip install -r requirements/test.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))  # inherited by all processes of this module, also by Ray's
        with ray_cluster(2):
            yield


@asynccontextmanager
async def team(folder: Path, **options: Any) -> AsyncIterator[LearnerClient]:
    of_ray = {"cluster": "ray", "cluster_learners": 1} | options
    client = LearnerClient(
        find("tiny"),
        EngineOptions(engine="embedded", device="cpu", threads=1, **of_ray),
        folder / "logs" / "learner.log",
    )
    try:
        yield client
    finally:
        await client.stop()


def learners() -> dict[bool, psutil.Process]:
    """The learners of this module's processes: whether Ray placed it -> process."""
    found: dict[bool, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = LEARNER_MODULE in words and process.environ().get(MARK) == str(os.getpid())
        except psutil.Error:
            continue
        if ours:
            found["--listen" in words] = process
    return found


async def last(client: LearnerClient, folder: Path, step: int) -> Event:
    return [event async for event in client.run(command(folder, random_groups(step), step, CONFIG))][-1]


async def test_it_trains_as_one_learner_and_leaves_no_process(tmp_path: Path) -> None:
    metrics: dict[str, list[float]] = {}
    for name, options in {"alone": {"cluster": None, "cluster_learners": 0}, "team": {}}.items():
        async with team(tmp_path, **options) as client:
            for step in range(2):
                event = await last(client, tmp_path / name, step)
                assert isinstance(event, Trained), event
                metrics[name] = [event.result.metrics[key] for key in ("loss/value", "grad_norm", "kl/base")]
            assert client.facts.get("learners", "1") == ("2" if name == "team" else "1")
            assert len(learners()) == (2 if name == "team" else 1)
    assert metrics["team"] == pytest.approx(metrics["alone"], rel=1e-3, abs=1e-6)
    await gone()
    assert (tmp_path / "logs" / "learner-2.log").exists()


async def test_of_actor_learner_and_first_learner_whichever_is_killed_ends_the_step_and_the_next_has_a_new_team(
    tmp_path: Path,
) -> None:
    async with team(tmp_path) as client:
        for victim in ("learner", "actor", "first"):
            event = await last(client, tmp_path, 0 if victim == "learner" else 1)
            assert isinstance(event, Trained), event
            step = event.result.step
            process = learners()[victim != "first"]
            pid = process.ppid() if victim == "actor" else process.pid
            assert pid != os.getpid()
            async for event in client.run(command(tmp_path, random_groups(step), step, CONFIG)):
                if isinstance(event, Progressed) and event.phase == "update":
                    with suppress(ProcessLookupError):  # at the second update
                        os.kill(pid, signal.SIGKILL)
            assert isinstance(event, Failed) and event.reason == "learner_died", event
            if victim == "learner":
                assert "The learner ends: learner 2 of 2 at " in event.message
    await gone()


async def gone() -> None:
    async with asyncio.timeout(30):
        while learners():
            await asyncio.sleep(0.1)
