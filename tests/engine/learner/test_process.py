"""The learner as a process of its own: its pipe, its signals, `kill -9`, a full disk."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from offbook.base.types import TrainResult
from offbook.engine.learner.__main__ import parse
from offbook.engine.learner.model import attention
from offbook.engine.learner.service import Service
from offbook.engine.protocol import (
    EVENTS,
    LEARNER_MODULE,
    Command,
    Event,
    Failed,
    MergeCommand,
    Merged,
    Progressed,
    Ready,
    StopCommand,
    Trained,
)
from tests.engine.learner.jobs import command, random_groups
from tests.paths import ROOT

SECONDS = 600


class LearnerProcess:
    """`python -m offbook.engine.learner` on pipes, or another `module` that runs it."""

    module = LEARNER_MODULE

    def __init__(self, base: Path, log: Path, largest_file: int | None = None, *flags: str) -> None:
        def limit() -> None:
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

        argv = [sys.executable, "-m", self.module, "--base", str(base), "--device", "cpu", "--dtype", "float32"]
        with log.open("ab") as errors:
            self.child = subprocess.Popen(
                [*argv, "--threads", "1", "--deterministic", *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                preexec_fn=limit,
            )

    def events(self) -> Iterator[Event]:
        """Every line of stdout is an event."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            yield EVENTS.validate_json(line)

    def send(self, sent: Command) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(sent.model_dump_json().encode() + b"\n")
        self.child.stdin.flush()

    def ask(self, sent: Command) -> Event:
        """The last event of a command."""
        self.send(sent)
        return next(event for event in self.events() if isinstance(event, Trained | Merged | Failed))

    def ready(self) -> Ready:
        event = next(self.events())
        assert isinstance(event, Ready)
        return event

    def wait(self) -> int:
        return self.child.wait(SECONDS)

    def close(self) -> None:
        self.child.kill()
        self.child.wait(SECONDS)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start(toy: Path, tmp_path: Path) -> Iterator[type]:
    started: list[LearnerProcess] = []

    def begin(largest_file: int | None = None) -> LearnerProcess:
        started.append(LearnerProcess(toy, tmp_path / "log", largest_file))
        return started[-1]

    yield begin  # type: ignore[misc]  # a function that makes them
    for process in started:
        process.close()


def bits(root: Path, step: int) -> dict[str, bytes]:
    folder = root / f"agent/checkpoints/{step:04d}"
    names = ("adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.slow("killed at every stage")
def test_four_steps_equal_two_then_kill_9_then_two_and_the_process_ends_as_told(start, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    process = start()
    assert process.ready().facts["mask_probe"].startswith("ok")
    for step in range(4):
        event = process.ask(command(whole, random_groups(step), step))
        assert isinstance(event, Trained)
        assert event.result.checkpoint == str(whole / f"agent/checkpoints/{step + 1:04d}")
    merged = tmp_path / "merged"
    adapter = whole / "agent/checkpoints/0004"
    assert isinstance(process.ask(MergeCommand(request_id="m", adapter=adapter, output=merged)), Merged)
    assert AutoModelForCausalLM.from_pretrained(merged).config.vocab_size == 1536
    refused = process.ask(MergeCommand(request_id="m", adapter=adapter, output=merged))
    assert isinstance(refused, Failed)
    assert "exists already" in refused.message
    process.send(StopCommand())
    assert process.wait() == 0

    process = start()
    process.ready()
    for step in range(2):
        process.ask(command(halves, random_groups(step), step))
    process.send(command(halves, random_groups(2), 2))
    for event in process.events():
        if isinstance(event, Progressed) and event.phase == "update":
            process.child.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL

    process = start()
    process.ready()
    for step in (2, 3):
        process.ask(command(halves, random_groups(step), step))
    for step in range(1, 5):
        assert bits(whole, step) == bits(halves, step)
    process.child.stdin.close()  # the parent is gone
    assert process.wait() == 3
    assert "its parent is gone" in (tmp_path / "log").read_text()


@pytest.mark.slow("killed at every stage")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_at_every_stage_leaves_step_n_or_n_minus_1_and_the_request_is_applied_once(
    toy: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.learner.dying_learner", str(toy), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    first, *lines = map(json.loads, done.stdout.splitlines())
    assert len(lines) >= 20
    phases = {line["stage"].split()[0] for line in lines}
    assert phases == {"plan", "old_logprobs", "update", "save", "after", "before"}
    for line in lines:
        assert line["signal"] == signal.SIGKILL, line
        assert line["again"] == 0, line
        assert line["bits"] == first["undisturbed"], line
        assert line["left"] == ["0001", "0002"], line
    renamed = [line["stage"] for line in lines].index("after rename")
    assert [line["step"] for line in lines] == [1] * renamed + [2] * (len(lines) - renamed)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_full_disk_fails_by_name_and_the_request_succeeds_once_there_is_room(start, tmp_path: Path) -> None:
    process = start(largest_file=2048)  # the adapter is larger
    process.ready()
    asked = command(tmp_path, random_groups(0), 0)
    event = process.ask(asked)
    assert isinstance(event, Failed)
    assert event.reason == "disk_full"
    assert str(tmp_path / "agent/checkpoints") in event.message
    assert list((tmp_path / "agent/checkpoints").iterdir()) == []
    resource.prlimit(process.child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    event = process.ask(asked)
    assert isinstance(event, Trained)
    assert event.result.step == 1
    assert load_file(tmp_path / "agent/checkpoints/0001/adapter_model.safetensors")
    process.child.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_base_that_cannot_be_loaded_is_a_failed_event_that_says_so(tmp_path: Path) -> None:
    process = LearnerProcess(tmp_path / "nowhere", tmp_path / "log")
    event = next(process.events())
    assert isinstance(event, Failed)
    assert "did not start" in event.message
    assert "nowhere" in event.message
    assert process.wait() == 1
    process.close()


def test_a_lost_device_ends_the_process_so_that_the_server_starts_a_new_one(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_: object) -> TrainResult:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    said = io.StringIO()
    service = Service(parse(["--base", str(toy), "--device", "cpu"]), said)
    monkeypatch.setattr(service.learner, "train", train)
    asked = iter([command(tmp_path, random_groups(0), step) for step in range(2)])
    service.run(asked)
    [failed] = [EVENTS.validate_json(line) for line in said.getvalue().splitlines()]
    assert isinstance(failed, Failed) and "illegal memory access" in failed.message
    assert next(asked).step == 1  # nobody took it


@pytest.fixture
def dropped_trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine whose attention knows nothing of trees, as Unsloth's on a GPU."""

    def dropping(module, query, key, value, mask, offbook_tree=None, **rest):
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    monkeypatch.setattr(attention, "tree_attention", dropping)
    yield
    monkeypatch.undo()
    attention.register()


@pytest.mark.usefixtures("dropped_trees")
def test_attention_that_drops_the_tree_is_refused_in_the_facts_the_log_and_the_metrics_and_trains_on_plain_rows(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = Service(parse(["--base", str(toy), "--device", "cpu", "--threads", "1"]), io.StringIO())
    facts = service.ready().facts
    assert facts["mask_probe"].startswith("refused: the mask probe differs by")
    assert facts["loader"].startswith("peft 0.")
    assert facts["attention"] == "offbook_tree"  # its plain rows, not the tree's kernel
    assert "The token tree is off for this model, plain rows are used" in capsys.readouterr().err
    event = service.answer(command(tmp_path, random_groups(0), 0))
    assert isinstance(event, Trained)
    metrics = event.result.metrics
    assert metrics["layout/probe_difference"] > 0.01
    assert (metrics["layout/tree_refused"], metrics["layout/tree"]) == (1.0, 0.0)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(r"step 1: [\d,]+ tokens computed as (leaf|call)_rows; the token tree is refused: the mask", line)
    assert [each for each in event.result.warnings if "instead of the token tree: the mask probe differs" in each]
    again = service.answer(command(tmp_path, random_groups(1), 1))
    assert isinstance(again, Trained) and not [each for each in again.result.warnings if "token tree" in each]
