"""A team of learners as processes: whichever is killed, whenever, none is left and the request is applied once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from offbook.base.config import TrainConfig
from offbook.engine.learner.__main__ import PARENT_DIED
from offbook.engine.learner.team import TEAM_BROKEN
from offbook.engine.protocol import Command, Progressed, StopCommand, Trained
from tests.engine.learner.jobs import command, random_groups
from tests.engine.learner.test_process import LearnerProcess, bits

CONFIG = TrainConfig(learning_rate=1e-2, loss="gspo", kl_coef=0.05, epochs=2, minibatches=2, row_tokens=64)
GONE_SECONDS = 30.0
"""Generous: the kernel ends them at once, on a machine that tests share."""


@contextmanager
def learners(base: Path, log: Path, size: int, *flags: str) -> Iterator[tuple[LearnerProcess, list[psutil.Process]]]:
    """A team that is ready: the first learner, and the other processes."""
    first = LearnerProcess(base, log, None, "--learners", str(size), *flags)
    try:
        assert first.ready().facts["learners"] == str(size)
        others = psutil.Process(first.child.pid).children()
        assert len(others) == size - 1
        yield first, others
    finally:
        first.close()


def none_left(others: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(others, GONE_SECONDS)
    return not alive


def reach(first: LearnerProcess, sent: Command, phase: str) -> None:
    first.send(sent)
    next(event for event in first.events() if isinstance(event, Progressed) and event.phase == phase)


@pytest.mark.slow("a team killed at every stage")
def test_whoever_is_killed_ends_the_step_and_all_learners_and_the_request_is_applied_once(
    toy: Path, tmp_path: Path
) -> None:
    log, root = tmp_path / "log", tmp_path / "killed"
    stages = (
        ("old_logprobs", "second"),
        ("update", "first"),
        ("save", "server"),
    )
    with learners(toy, log, 2) as (first, others):
        for step in range(len(stages)):
            assert isinstance(first.ask(command(tmp_path / "whole", random_groups(step), step, CONFIG)), Trained)
        first.send(StopCommand())
        assert first.wait() == 0
        assert none_left(others)
    for step, (phase, victim) in enumerate((*stages, ("", ""))):
        with learners(toy, log, 2) as (first, others):
            if step:
                event = first.ask(command(root, random_groups(step - 1), step - 1, CONFIG))  # sent again
                assert isinstance(event, Trained) and event.result.step == step
                assert bits(root, step) == bits(tmp_path / "whole", step)
            if not phase:
                first.child.send_signal(signal.SIGTERM)
                assert first.wait() == 128 + signal.SIGTERM
            else:
                end_in(phase, victim, first, others, command(root, random_groups(step), step, CONFIG))
            assert none_left(others)
    assert "learner 2 of 2 ended (signal 9 (SIGKILL))" in log.read_text()
    assert sorted(path.name for path in (root / "agent/checkpoints").iterdir()) == [f"000{n}" for n in range(1, 4)]


def end_in(phase: str, victim: str, first: LearnerProcess, others: list[psutil.Process], sent: Command) -> None:
    """Let the step reach the phase, and end one of them there."""
    reach(first, sent, phase)
    if victim == "second":
        others[0].kill()
        assert first.wait() == TEAM_BROKEN
    elif victim == "first":
        first.child.kill()
    else:
        assert first.child.stdin is not None
        first.child.stdin.close()
        assert first.wait() == PARENT_DIED


@pytest.mark.slow("a team of four processes")
def test_four_learners_train_as_one_also_after_a_rest(toy: Path, tmp_path: Path) -> None:
    results: dict[int, list[float]] = {}
    for size in (1, 4):
        with learners(toy, tmp_path / "log", size) if size > 1 else single(toy, tmp_path / "log") as (first, _):
            results[size] = []
            for step in range(2):
                event = first.ask(command(tmp_path / str(size), random_groups(step, groups=4), step, CONFIG))
                assert isinstance(event, Trained)
                results[size] += [event.result.metrics[name] for name in ("loss/value", "grad_norm", "kl/base")]
                time.sleep(3.0 if size > 1 and step == 0 else 0.0)
    assert results[4] == pytest.approx(results[1], rel=1e-3, abs=1e-6)


@contextmanager
def single(base: Path, log: Path) -> Iterator[tuple[LearnerProcess, list[psutil.Process]]]:
    first = LearnerProcess(base, log)
    try:
        first.ready()
        yield first, []
    finally:
        first.close()
