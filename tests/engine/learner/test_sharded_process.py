"""A team of processes with a sharded base: who fails in a pass, or is killed, ends the step and all of them; nobody waits on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError
from offbook.engine.learner.__main__ import check_shard, parse
from offbook.engine.learner.team import TEAM_BROKEN
from offbook.engine.protocol import CompletionScored, Failed, ScoreCommand, StopCommand, TrainCommand, Trained
from tests.engine.learner.jobs import command, random_groups
from tests.engine.learner.test_process import LearnerProcess
from tests.engine.learner.test_team_process import learners, none_left, reach, single

CONFIG = TrainConfig(learning_rate=1e-2, loss="gspo", kl_coef=0.05, epochs=2, minibatches=2, row_tokens=64)


class BreakingLearner(LearnerProcess):
    """See `breaking_learner.py`."""

    module = "tests.engine.learner.breaking_learner"


@pytest.mark.slow("a team with a sharded base, broken")
def test_a_failure_in_a_pass_is_named_and_ends_the_team(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    sent = command(root, random_groups(0), 0, CONFIG)

    monkeypatch.setenv("BREAK", "1 backward kill")
    with learners(toy, log, 2, "--shard", kind=BreakingLearner) as (first, others):
        first.send(sent)
        assert not [event for event in first.events() if isinstance(event, Trained | Failed)]
        assert first.wait() == TEAM_BROKEN
        assert none_left(others)
    assert log.read_text().count("The learner ends: learner 2 of 2 ended (signal 9 (SIGKILL))") == 1

    monkeypatch.setenv("BREAK", "1 forward memory")
    with learners(toy, log, 2, "--shard", kind=BreakingLearner) as (first, others):
        event = first.ask(sent)
        assert isinstance(event, Failed) and (event.reason, event.request_id) == ("out_of_memory", sent.request_id)
        assert event.message.startswith("learner 2 of 2: the learner ran out of memory")
        assert "lower row_tokens" in event.message
        first.wait()
        assert none_left(others)
    assert not list((root / "agent/checkpoints").glob("0*"))

    monkeypatch.setenv("BREAK", "1 load memory")
    first = BreakingLearner(toy, log, None, "--learners", "2", "--shard")
    event = next(first.events())
    assert isinstance(event, Failed)
    began = "The learner did not start: learner 2 of 2: the learner ran out of memory while it loaded the base"
    assert event.message.startswith(began)
    assert first.wait() == TEAM_BROKEN
    first.close()


@pytest.mark.slow("a team with a sharded base, killed between passes")
def test_a_team_with_a_sharded_base_trains_as_one_learner_whoever_is_killed(toy: Path, tmp_path: Path) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    with single(toy, log) as (whole, _):
        expected = whole.ask(command(tmp_path / "whole", random_groups(0), 0, CONFIG))
        scores = scored(whole)
    assert isinstance(expected, Trained)
    with learners(toy, log, 2, "--shard") as (first, others):
        assert scored(first) == pytest.approx(scores, abs=1e-5)
        event = first.ask(command(root, random_groups(0), 0, CONFIG))
        assert isinstance(event, Trained)
        for name in ("loss/value", "grad_norm", "kl/base"):
            assert event.result.metrics[name] == pytest.approx(expected.result.metrics[name], rel=1e-3, abs=1e-6)
        wait_in_a_pass(first, others[0], command(root, random_groups(1), 1, CONFIG))
        first.child.terminate()
        assert first.wait() == -signal.SIGTERM
        assert none_left(others)
    with learners(toy, log, 2, "--shard") as (first, others):
        reach(first, command(root, random_groups(1), 1, CONFIG), "save")
        others[0].kill()
        assert first.wait() == TEAM_BROKEN
        assert none_left(others)
    with learners(toy, log, 2, "--shard") as (first, others):
        event = first.ask(command(root, random_groups(1), 1, CONFIG))
        assert isinstance(event, Trained) and event.result.step == 2
        assert first.ask(command(root, random_groups(1), 1, CONFIG)) == event
        first.send(StopCommand())
        assert first.wait() == 0
        assert none_left(others)
    assert sorted(path.name for path in (root / "agent/checkpoints").iterdir()) == ["0001", "0002"]


def wait_in_a_pass(first: LearnerProcess, other: psutil.Process, sent: TrainCommand) -> None:
    """Let the first learner wait for the other, which stands still since the step's first passes."""
    reach(first, sent, "old_logprobs")
    other.suspend()
    process, used = psutil.Process(first.child.pid), -1.0
    while used != (used := sum(process.cpu_times()[:2])):
        time.sleep(0.5)


def scored(first: LearnerProcess) -> tuple[float, ...]:
    """The logprobs of a completion under the base."""
    first.send(ScoreCommand(request_id="s", prompt_ids=(1, 2, 3), completion_ids=(4, 5, 6)))
    return next(event.logprobs for event in first.events() if isinstance(event, CompletionScored))


def test_what_a_sharded_base_does_not_go_together_with_is_refused_by_name(toy: Path) -> None:
    for flags, option in (
        ([], "--learners 1"),
        (["--learners", "2", "--load-in-4bit"], "--load-in-4bit"),
        (["--learners", "2", "--loader", "unsloth"], "--loader unsloth"),
        (["--learners", "2", "--offload"], "--offload"),
        (["--learners", "2", "--device", "mps"], "--device mps"),
    ):
        arguments = parse(["--base", str(toy), "--device", "cpu", "--shard", *flags])
        with pytest.raises(ConfigError, match=f"--shard does not go together with {option}"):
            check_shard(arguments)
    auto = parse(["--base", str(toy), "--shard", "--learners", "2"])
    check_shard(auto)
    assert auto.loader == "peft"
