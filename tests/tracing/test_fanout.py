"""Training never waits for a sink, a sink never stops it, and nothing is lost when one is away."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbook.contracts import EVENT_KINDS, CheckpointSaved, GroupsFinished, StepFinished, TraceSink
from offbook.testing.sinks import RUN, sample_events
from offbook.tracing.delivery_notes import DeliveryNotes
from offbook.tracing.fanout import FanOut
from offbook.tracing.jsonl import JsonlSink
from offbook_langfuse import LangfuseConnection, LangfuseSink
from tests.fakes.trace_server import PUBLIC, SECRET, TraceServer, trace_server, until
from tests.paths import ROOT


@pytest.fixture
def server() -> Iterator[TraceServer]:
    with trace_server() as served:
        yield served


def langfuse(server: TraceServer, timeout: float = 0.5) -> LangfuseSink:
    return LangfuseSink(LangfuseConnection(server.url, PUBLIC, SECRET), timeout=timeout)


class Broken(TraceSink):
    """A sink whose server is away."""

    name = "broken"

    def step_finished(self, event: StepFinished) -> None:
        raise ConnectionError("away")

    def closed(self) -> None:
        raise ValueError("never opened")


def test_every_kind_of_event_has_a_method_of_the_sink() -> None:
    methods = {name for name, member in vars(TraceSink).items() if callable(member) and not name.startswith("_")}
    assert {kind.method for kind in EVENT_KINDS} == methods - {"check", "closed"}


class Slow(TraceSink):
    """A sink that takes nothing until it may."""

    name = "slow"

    def __init__(self) -> None:
        self.may = threading.Event()
        self.steps: list[int] = []

    def step_finished(self, event: StepFinished) -> None:
        self.may.wait(30)
        self.steps.append(event.step)


def step(number: int) -> StepFinished:
    return StepFinished(RUN, "agent", number, number - 1, 1.0, {"reward": 1.0})


def test_a_broken_sink_is_named_once_per_kind_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fanout = FanOut([Broken(), JsonlSink(tmp_path / "log")], RUN, [], notes=tmp_path / "notes")
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            fanout.publish(step(number))
        [line] = fanout.close()
    warned = [record.getMessage() for record in caplog.records]
    assert [each.split(": ")[-2] for each in warned] == ["ConnectionError", "ValueError"]
    assert line.endswith(f"`offbook traces export --run {RUN} --to broken`") and "3 events" in line
    steps = [json.loads(each)["step"] for each in (tmp_path / "log/steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_what_a_server_rejects_for_good_is_named_and_not_delivered_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = [event for event in sample_events() if isinstance(event, GroupsFinished)]
    with trace_server(refused_scores=lambda body: body["name"] == "success") as server:
        fanout = FanOut([langfuse(server)], RUN, [], notes=tmp_path)
        with caplog.at_level(logging.WARNING):
            fanout.publish(events[0])
            assert fanout.close() == []
        assert "some of this was rejected for good: 3 of 9 scores were refused" in caplog.text
        assert len(server.traces()) == 4 and not list(tmp_path.iterdir())


def test_publishing_never_waits_and_closing_waits_only_so_long(tmp_path: Path) -> None:
    slow = Slow()
    fanout = FanOut([slow], RUN, [], notes=tmp_path, queued=5)
    began = time.monotonic()
    for number in range(1, 21):
        fanout.publish(step(number))
    assert time.monotonic() - began < 1
    began = time.monotonic()
    [line] = fanout.close(seconds=0.3)
    assert time.monotonic() - began < 2 and "20 events" in line
    slow.may.set()
    again = Slow()
    again.may.set()
    later = FanOut([again], "another-run", [], notes=tmp_path)
    later.publish(StepFinished("another-run", "agent", 99, 98, 2.0, {}))
    assert until(lambda: 99 in again.steps)
    assert later.close() == []
    assert until(lambda: {*slow.steps, *again.steps} == {*range(1, 21), 99} and not list(tmp_path.iterdir()))
    assert len(slow.steps) <= 6  # 5 in the first run's queue and 1 being delivered; the notes had the rest


def test_what_a_server_did_not_take_is_tried_again_at_the_end_and_arrives_once(
    server: TraceServer, tmp_path: Path
) -> None:
    server.faults.extend([500, 500, 500])
    fanout = FanOut([langfuse(server)], RUN, [], notes=tmp_path)
    for event in sample_events():
        fanout.publish(event)
    assert fanout.close() == ["trace sink 'langfuse': it works again, all events were delivered"]
    assert server.faults_found() == [] and not list(tmp_path.iterdir())
    assert Counter(span.type for span in server.spans.values())["agent"] == 24


def test_a_server_that_hangs_delays_no_end_and_the_next_run_delivers(server: TraceServer, tmp_path: Path) -> None:
    with trace_server() as reference:
        fanout = FanOut([langfuse(reference)], RUN, [], notes=tmp_path / "reference")
        for event in sample_events():
            fanout.publish(event)
        assert fanout.close() == []
    steps = [each for each in sample_events() if isinstance(each, StepFinished)]
    server.faults.extend(["hang"] * 1000)
    fanout = FanOut([langfuse(server, timeout=0.2)], RUN, [], notes=tmp_path / "notes")
    for event in steps:
        fanout.publish(event)
    began = time.monotonic()
    [line] = fanout.close(seconds=1.0)
    assert time.monotonic() - began < 3 and "2 events" in line and server.scores == {}
    server.faults.clear()
    later = FanOut([langfuse(server)], "later", [], notes=tmp_path / "notes")
    assert later.close() == [] and not list((tmp_path / "notes").iterdir())
    wanted = {id for id, score in reference.scores.items() if score.get("sessionId") and "/" not in score["name"]}
    assert server.scores.keys() == {id for id in wanted if reference.scores[id]["name"] in ("reward", "entropy")}


KILLED = """
import sys, time
from pathlib import Path
from offbook.contracts import StepFinished
from offbook.testing.sinks import RUN, sample_events
from offbook.tracing.fanout import FanOut
from offbook_langfuse import LangfuseConnection, LangfuseSink
url, public, secret, notes = sys.argv[1:]
fanout = FanOut([LangfuseSink(LangfuseConnection(url, public, secret), timeout=60)], RUN, [], notes=Path(notes))
for event in sample_events():
    if isinstance(event, StepFinished):
        fanout.publish(event)
print("published", flush=True)
time.sleep(60)
"""


SLOW = """
import atexit, sys, time
atexit.register(time.sleep, 2)  # a local server that is stopped at the end takes as long
from pathlib import Path
from offbook.contracts import StepFinished
from offbook.testing.sinks import RUN, sample_events
from offbook.tracing.fanout import FanOut
from offbook_langfuse import LangfuseConnection, LangfuseSink
url, public, secret, notes = sys.argv[1:]
fanout = FanOut([LangfuseSink(LangfuseConnection(url, public, secret), timeout=60)], RUN, [], notes=Path(notes))
for event in sample_events():
    if isinstance(event, StepFinished):
        fanout.publish(event)
print(*fanout.close(seconds=0.5), flush=True)
"""


def test_a_process_that_ends_while_a_sink_is_slow_says_only_what_is_missing(tmp_path: Path) -> None:
    with trace_server(hang_seconds=1.0) as server:
        server.faults.extend(["hang"] * 5)
        words = [sys.executable, "-c", SLOW, server.url, PUBLIC, SECRET, str(tmp_path)]
        paths = f"{ROOT / 'src'}:{ROOT / 'integrations'}"
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=30, env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
        )
    assert "2 events of run" in ended.stdout and ended.stderr == "" and ended.returncode == 0


def test_a_process_that_is_killed_in_the_middle_leaves_notes_of_what_it_owes(
    server: TraceServer, tmp_path: Path
) -> None:
    server.faults.append("hang")
    words = [sys.executable, "-c", KILLED, server.url, PUBLIC, SECRET, str(tmp_path)]
    paths = f"{ROOT / 'src'}:{ROOT / 'integrations'}"
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
    )
    assert child.stdout is not None and child.stdout.readline() == "published\n"
    child.kill()
    child.wait(10)
    child.stdout.close()
    [notes] = DeliveryNotes.of_sink(tmp_path, "langfuse")
    assert [note.event.id for note in notes.undelivered] == [f"{RUN}/agent/1/step", f"{RUN}/agent/2/step"]
    server.faults.clear()
    assert FanOut([langfuse(server)], "next", [], notes=tmp_path).close() == []
    assert sorted({score["sessionId"] for score in server.scores.values()}) == [
        f"step-00000/{RUN}",
        f"step-00001/{RUN}",
    ]


def test_notes_survive_lines_that_are_damaged_and_a_checkpoint_is_read_where_it_is(tmp_path: Path) -> None:
    notes = DeliveryNotes(tmp_path, RUN, "a sink")
    notes.due(step(1), ())
    notes.due(CheckpointSaved(RUN, "agent", 1, "/models/0001"), ("http://gpu",))
    [file] = tmp_path.iterdir()
    with file.open("ab") as out:
        out.write(b'\xff\xfe{"due"\n' + b"[" * 200_000 + b'\n{"due": "StepFin')
    [found] = DeliveryNotes.of_sink(tmp_path, "a sink")
    assert [(note.event.id, note.servers) for note in found.undelivered] == [
        (f"{RUN}/agent/1/step", ()), (f"{RUN}/agent/1/checkpoint", ("http://gpu",)),
    ]  # fmt: skip


def test_notes_that_two_processes_share_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    run = DeliveryNotes(tmp_path, RUN, "a sink")
    for number in (1, 2, 3):
        run.due(step(number), ())
    [next_run] = DeliveryNotes.of_sink(tmp_path, "a sink")
    run.due(step(4), ())
    for note in next_run.undelivered:
        next_run.taken(note.event)
    [found] = DeliveryNotes.of_sink(tmp_path, "a sink")
    assert [note.event.id for note in found.undelivered] == [f"{RUN}/agent/4/step"]
    run.taken(step(4))
    assert run.undelivered == [] and not list(tmp_path.iterdir())

    run.due(step(5), ())
    run.due(step(6), ())
    [next_run] = DeliveryNotes.of_sink(tmp_path, "a sink")
    for note in next_run.undelivered:
        next_run.taken(note.event)
    run.taken(step(5))  # it was being delivered all the time
    assert not list(tmp_path.iterdir())
