"""The trainer, or its server, killed with signal 9 in each phase of a step, and begun again: each step is applied once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from offbook.base.types import new_id
from tests.campaign.campaign import free_port
from tests.paths import ROOT
from tests.server.servers import RunningServer, until

from .stopped_trainer import HELD_OUT, PHASES, STEPS

SECONDS = 900.0
"""Generous, for machines that are shared."""


class Training:
    """The processes of one run."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.model, self.run = url, new_id("agent"), new_id("run")
        self.mark, self._log = folder / "mark", folder / "log"

    def start(self, phase: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.trainer.stopped_trainer", self.url, self.model, self.run, phase]
        with self._log.open("ab") as log:
            return subprocess.Popen([*words, str(self.mark)], stdout=log, stderr=log, cwd=ROOT)

    def stopped_at(self, phase: str) -> subprocess.Popen[bytes]:
        process = self.start(phase)
        try:
            until(lambda: self.mark.exists() or process.poll() is not None, f"it stands still at {phase}", SECONDS)
            assert process.poll() is None, self.said()
        except BaseException:
            process.kill()
            raise
        return process

    def finish(self) -> None:
        """The same command again, to its end."""
        process = self.start("none")
        try:
            assert process.wait(SECONDS) == 0, self.said()
        finally:
            process.kill()

    def said(self) -> str:
        return self._log.read_text("utf-8", "replace")[-3_000:]

    def check(self) -> None:
        """Every step was applied once, on rollouts of its own, and the run's page shows each step and evaluation once."""
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as http:
            assert http.get(f"/api/models/{self.model}").json()["step"] == STEPS
            made = [each["step"] for each in http.get(f"/api/models/{self.model}/checkpoints").json()]
            page = http.get(f"/pages/data/runs/{self.run}").json()
            listed = http.get("/api/trajectories", params={"run": self.run, "limit": 1_000}).json()["trajectories"]
            logged = http.get(f"/api/models/{self.model}/log").json()
        assert made == [1, 2, 3]
        assert page["x"]["updates"]["step"] == [1, 2, 3], page["x"]
        assert page["x"]["val"]["step"] == [0, 1, 2, 3], page["x"]
        claims = Counter(call["call_id"] for each in listed for call in each["calls"] or ())
        assert set(claims.values()) == {1}, "a call belongs to one rollout"
        assert len({each["id"] for each in listed}) == len(listed)
        for entry in logged:
            assert entry["split"] != "val" or len(entry["trajectory_ids"]) == len(HELD_OUT), entry


class Served:
    """A server that is killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.server = self._started()

    def restart(self) -> None:
        self.server.kill()
        self.server.http.close()
        self.server = self._started()

    def _started(self) -> RunningServer:
        return RunningServer(self._folder, "--port", str(self._port))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(tmp_path_factory.mktemp("killed") / "dir")
    try:
        yield running
    finally:
        running.server.__exit__(None, None, None)


@pytest.mark.slow("kills of real servers")
@pytest.mark.parametrize(
    ("phase", "killed"),
    [
        *((phase, "trainer") for phase in PHASES),
        ("training", "server"),
    ],
)
def test_a_kill_in_any_phase_of_a_run_loses_no_step_and_makes_none_twice(
    served: Served, tmp_path: Path, phase: str, killed: str
) -> None:
    """The same command again ends the run, also where the trainer itself went on with the server that came back."""
    training = Training(served.url, tmp_path)
    process = training.stopped_at(phase)
    try:
        if killed == "trainer":
            process.kill()
        else:
            served.restart()
        training.mark.unlink()
        process.wait(SECONDS)
    finally:
        process.kill()
    training.finish()
    training.check()
