"""A user's sink that hangs, raises or is slow, at the start, in the middle or at the end of a run: the run ends all the same,
says what is missing."""

from __future__ import annotations

import io
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai.types.chat.chat_completion import Choice
from rich.console import Console

from offbook import TrainableModel, Trainer, Trajectory
from offbook.contracts import StepFinished, TraceSink
from offbook.tracing import fanout
from offbook.tracing.fanout import FanOut
from offbook.trainer import sink_publisher
from offbook.trainer.progress import PlainProgress
from offbook.trainer.report import Stopped
from tests.fakes.scripted_training import ScriptedTraining, scripted_training

NUMBERS = itertools.count()
FAULTS = ("hangs", "raises", "is slow")
MOMENTS = ("start", "middle", "end")


class Faulty(TraceSink):
    """A sink with one fault at one moment. It hangs until `released` is set."""

    name = "faulty"

    def __init__(self, fault: str = "", moment: str = "") -> None:
        self.fault, self.moment = fault, moment
        self.released = threading.Event()
        self.steps = set[int]()

    def check(self) -> None:
        self.fail("start")

    def step_finished(self, event: StepFinished) -> None:
        self.fail("middle")
        self.steps.add(event.step)

    def closed(self) -> None:
        self.fail("end")

    def fail(self, moment: str) -> None:
        if moment == self.moment and not self.released.is_set():
            if self.fault == "raises":
                raise AttributeError("no such field")
            self.released.wait(0.05 if self.fault == "is slow" else 120)


async def no_rollouts(*_: object) -> tuple[()]:
    return ()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedTraining]:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path))
    monkeypatch.setattr(fanout, "read_groups", no_rollouts)  # the scripted server keeps none
    with scripted_training() as training:
        yield training


async def rollout(model: TrainableModel, scenario: dict[str, str]) -> Trajectory:
    number = next(NUMBERS)
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    choice |= {"offbook": {"call_id": f"call-{number}", "index": 0}}
    return Trajectory(messages_and_choices=[Choice.model_validate(choice)], reward=float(number % 2))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_the_run_ends_and_says_what_is_missing(
    fault: str, moment: str, server: ScriptedTraining, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at_start = fault == "hangs" and moment == "start"
    at_end = fault == "hangs" and moment != "start"
    monkeypatch.setattr(sink_publisher, "CHECK_SECONDS", 0.5 if at_start else 30.0)
    monkeypatch.setattr(FanOut.close, "__defaults__", (3.0 if at_end else 30.0,))
    out, faulty, sound = io.StringIO(), Faulty(fault, moment), Faulty()
    sound.name = "sound"
    progress = PlainProgress(Console(file=out, width=400), 2)
    trainer = Trainer(
        server.model(), rollout, [{"id": "a"}], sinks=[faulty, sound], group_size=2, scenarios_per_step=1,
        progress=progress,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        report = await trainer.atrain(2)
    assert (report.stopped, report.step, sound.steps) == (Stopped.FINISHED, 2, {1, 2})
    assert not any(thread.name.startswith("offbook-trace") and not thread.daemon for thread in threading.enumerate())
    warned, said = caplog.text, [line for line in out.getvalue().splitlines() if "trace sink" in line]
    if fault == "is slow":
        assert "trace sink" not in warned and said == []
    elif moment == "start":
        why = "no answer within 0.5 s" if fault == "hangs" else "AttributeError: no such field"
        assert f"trace sink 'faulty' does not answer, what it misses is sent again when the run ends: {why}" in warned
        assert said == []
    elif moment == "middle":
        [line] = said
        assert "trace sink 'faulty': " in line and f"events of run {report.run} were not delivered" in line
        assert ("AttributeError" in warned) == (fault == "raises")
    else:
        [line] = said
        why = "closing failed: AttributeError" if fault == "raises" else "it was still busy"
        assert f"trace sink 'faulty': {why}" in line
        assert f"took all events of run {report.run}" in line and "delivered" not in line
    faulty.released.set()
