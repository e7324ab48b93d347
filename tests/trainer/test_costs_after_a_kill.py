"""What a judge's answer cost is logged once with the model, whenever the trainer is killed with signal 9 after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook.testing import ScriptedLlm, says, scripted_llm
from tests.fakes.scripted_training import ScriptedTraining, scripted_training
from tests.paths import ROOT


class Runs:
    """The same run as one process after another, in a folder of records of its own."""

    def __init__(self, server: ScriptedTraining, endpoint: ScriptedLlm, folder: Path) -> None:
        assert server.api is not None
        self.server, self.folder = server, folder
        self._words = [sys.executable, "-m", "tests.trainer.paying_trainer", server.api.url, endpoint.url]

    def start(self, *waits: str, stderr: int | None = None) -> subprocess.Popen[str]:
        environment = {**os.environ, "OFFBOOK_DIR": str(self.folder), "OPENAI_API_KEY": "none"}
        return subprocess.Popen(
            [*self._words, *waits],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=ROOT,
            env=environment,
            bufsize=1,
        )

    def to_its_end(self) -> str:
        """Run once, and return what it wrote to stderr."""
        with self.start(stderr=subprocess.PIPE) as process:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            return errors

    def costs(self) -> dict[str, float]:
        """The logged costs by the log's id: a server keeps one log of an id."""
        return {log["id"]: log["metrics"]["costs/judge"] for log in self.server.logs}


class Deadly(list[Any]):
    """Kills a process while the log that it sends is being taken."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__()
        self._process = process

    def append(self, log: Any) -> None:
        super().append(log)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with scripted_training() as server, scripted_llm([says("fine")]) as endpoint:
        yield Runs(server, endpoint, tmp_path)


def test_an_answer_that_was_paid_before_a_kill_is_logged_by_the_next_run(runs: Runs) -> None:
    with runs.start("waits") as process:
        assert process.stdout is not None
        while process.stdout.readline() != "paid\n":
            assert process.poll() is None
        process.kill()
    assert not runs.server.logs
    runs.to_its_end()
    killed, own = runs.server.logs
    assert list(runs.costs().values()) == [1.0, 1.0]
    assert killed["trajectory_ids"] and killed["trajectory_ids"] != own["trajectory_ids"]
    assert not list((runs.folder / "spending").rglob("*.json*")), "what is logged is kept no longer"


def test_costs_whose_place_cannot_be_read_are_logged_and_named(runs: Runs) -> None:
    with runs.start("waits") as process:
        assert process.stdout is not None
        while process.stdout.readline() != "paid\n":
            assert process.poll() is None
        process.kill()
    [place] = (runs.folder / "spending").rglob("place.json")
    place.write_text("{", "utf-8")
    assert "place.json cannot be read, so what other LLMs cost is logged with the model alone" in runs.to_its_end()
    assert list(runs.costs().values()) == [1.0, 1.0]


@pytest.mark.slow("kills of trainers")
def test_costs_whose_log_arrived_before_a_kill_are_not_logged_twice(runs: Runs) -> None:
    process = runs.start()
    runs.server.logs = Deadly(process)
    with process:
        assert process.wait(300) == -signal.SIGKILL
    runs.server.logs = list(runs.server.logs)
    runs.to_its_end()
    assert len(runs.server.logs) == 3
    assert list(runs.costs().values()) == [1.0, 1.0]


@pytest.mark.slow("kills of trainers")
def test_a_run_leaves_the_costs_of_another_that_goes_on(runs: Runs) -> None:
    with runs.start("waits") as process:
        assert process.stdout is not None
        while process.stdout.readline() != "paid\n":
            assert process.poll() is None
        runs.to_its_end()
        assert len(runs.server.logs) == 1
        process.kill()
