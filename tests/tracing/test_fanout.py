"""Training never waits for a sink, a sink never stops it, and what one misses is named."""

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

from offbook.contracts import EVENT_KINDS, GroupsFinished, StepFinished, TraceSink
from offbook.testing.sinks import RUN, sample_events
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
    fanout = FanOut([Broken(), JsonlSink(tmp_path / "log")], RUN, [])
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            fanout.publish(step(number))
        [line] = fanout.close()
    warned = [record.getMessage() for record in caplog.records]
    assert [each.split(": ")[-2] for each in warned] == ["ConnectionError", "ValueError"]
    assert f"3 events of run {RUN} were not delivered: `offbook traces export --run {RUN} --to broken`" in line
    steps = [json.loads(each)["step"] for each in (tmp_path / "log/steps.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_what_a_server_rejects_for_good_is_named_and_not_delivered_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = [event for event in sample_events() if isinstance(event, GroupsFinished)]
    with trace_server(refused_scores=lambda body: body["name"] == "success") as server:
        fanout = FanOut([langfuse(server)], RUN, [])
        with caplog.at_level(logging.WARNING):
            fanout.publish(events[0])
            assert fanout.close() == []
        assert "some of this was rejected for good: 3 of 9 scores were refused" in caplog.text
        assert len(server.traces()) == 4


def test_publishing_never_waits_and_closing_waits_only_so_long(tmp_path: Path) -> None:
    slow = Slow()
    fanout = FanOut([slow], RUN, [], queued=5)
    began = time.monotonic()
    for number in range(1, 21):
        fanout.publish(step(number))
    assert time.monotonic() - began < 1
    began = time.monotonic()
    [line] = fanout.close(seconds=0.3)
    assert time.monotonic() - began < 2 and "20 events" in line
    slow.may.set()
    assert until(lambda: len(slow.steps) >= 5)  # 5 in the queue, and 1 if the thread took it before the queue was full


def test_what_a_server_did_not_take_is_tried_again_at_the_end_and_arrives_once(
    server: TraceServer, tmp_path: Path
) -> None:
    server.faults.extend([500, 500, 500])
    fanout = FanOut([langfuse(server)], RUN, [])
    for event in sample_events():
        fanout.publish(event)
    assert fanout.close() == ["trace sink 'langfuse': it works again, all events were delivered"]
    assert server.faults_found() == []
    assert Counter(span.type for span in server.spans.values())["agent"] == 24


def test_a_server_that_hangs_delays_no_end(server: TraceServer) -> None:
    steps = [event for event in sample_events() if isinstance(event, StepFinished)]
    server.faults.extend(["hang"] * 1000)
    fanout = FanOut([langfuse(server, timeout=0.2)], RUN, [])
    for event in steps:
        fanout.publish(event)
    began = time.monotonic()
    [line] = fanout.close(seconds=1.0)
    assert time.monotonic() - began < 3 and "2 events" in line and server.scores == {}


SLOW = """
import atexit, sys, time
atexit.register(time.sleep, 2)  # a local server that is stopped at the end takes as long
from offbook.contracts import StepFinished
from offbook.testing.sinks import RUN, sample_events
from offbook.tracing.fanout import FanOut
from offbook_langfuse import LangfuseConnection
from offbook_langfuse import LangfuseSink
url, public, secret = sys.argv[1:]
fanout = FanOut([LangfuseSink(LangfuseConnection(url, public, secret), timeout=60)], RUN, [])
for event in sample_events():
    if isinstance(event, StepFinished):
        fanout.publish(event)
print(*fanout.close(seconds=0.5), flush=True)
"""


def test_a_process_that_ends_while_a_sink_is_slow_says_only_what_is_missing(tmp_path: Path) -> None:
    with trace_server(hang_seconds=1.0) as server:
        server.faults.extend(["hang"] * 5)
        words = [sys.executable, "-c", SLOW, server.url, PUBLIC, SECRET]
        paths = f"{ROOT / 'src'}:{ROOT / 'integrations'}"
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=30, env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
        )
    assert "2 events of run" in ended.stdout and ended.stderr == "" and ended.returncode == 0
