"""What trace sinks cost: `python benchmarks/trace_export.py` writes benchmarks/results/trace_export.md.

First the quickstart's training (tiny policy, embedded engine) after its first step, some steps with each sink: the processor
time of everything that the sink adds, against that of the steps themselves. Then the seconds in which sample rollouts are exported. The Langfuse
stand-in of the tests and an OTLP collector answer from a process of their own, whose time does not count. The goals: a share of
less than 2 % of a step's processor time, and 1,280 rollouts in less than 10 s. Run it on a quiet machine: beside other work the
learner's threads wait for each other in busy loops, which counts as a step's time and makes the share look small. `--steps 1 --rollouts 256 --output FILE` is a smaller run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil

from offbook import LocalBackend, TrainableModel
from offbook.client.connection.http import Api
from offbook.contracts import GroupsFinished, TraceEvent, TraceSink
from offbook.quickstart.desk import Desk
from offbook.quickstart.run import GROUP_SIZE, SCENARIOS_PER_STEP, TRAIN_REQUESTS, schedule, trainable_agent
from offbook.testing.sinks import sample_rollout
from offbook.tracing.fanout import FanOut, show
from offbook.tracing.rollout_reader import read_groups
from offbook_langfuse import LangfuseConnection, LangfuseSink
from offbook_sinks.otlp_sink import OtlpSink

COLLECTOR = """
import json, sys
from tests.fakes.trace_server import trace_server
with trace_server(langfuse=sys.argv[1] == "langfuse") as server:
    print(server.url, flush=True)
    sys.stdin.readline()
    print(json.dumps([len(server.traces()), len(server.spans), len(server.scores), server.faults_found()]), flush=True)
"""
ROOT = Path(__file__).parents[1]
KEYS = ("pk-lf-test", "sk-lf-test")
GROUPS_OF = 64
"""Rollouts of one event."""
SHARE, SECONDS = 2.0, 10.0
"""The goals: percent of a step's processor time, and seconds of exporting 1,280 rollouts."""
READS = 5
"""How often the groups are read again, for the server's share."""


@dataclass
class Collector:
    """`counts`: traces, spans, scores and broken rules, when the block has ended."""

    url: str
    counts: list[Any] = field(default_factory=list[Any])


@contextmanager
def collector(kind: str) -> Generator[Collector]:
    """The stand-in in a process of its own."""
    command = [sys.executable, "-c", COLLECTOR, kind]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None and process.stdin is not None
        served = Collector(process.stdout.readline().strip())
        yield served
        process.stdin.write("\n")
        process.stdin.flush()
        served.counts = json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def sink_to(kind: str, url: str) -> TraceSink:
    if kind == "langfuse":
        return LangfuseSink(LangfuseConnection(url, *KEYS))
    return OtlpSink(f"{url}/v1/traces")


class MeasuredSink:
    """The sink as it is; once it is closed, `seconds` is the processor time of its thread, in which it is the only one."""

    def __init__(self, sink: TraceSink) -> None:
        self._sink = sink
        self.seconds = 0.0
        self.groups: list[Sequence[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def groups_finished(self, event: GroupsFinished) -> None:
        self.groups.append(event.groups)
        self._sink.groups_finished(event)

    def closed(self) -> None:
        self._sink.closed()
        self.seconds = time.thread_time()


@contextmanager
def measured_publishing() -> Generator[list[float]]:
    """The processor seconds of handing over each event, in the training's own thread."""
    publish, seconds = FanOut.publish, list[float]()

    def measured(self: FanOut, event: TraceEvent) -> None:
        began = time.thread_time()
        publish(self, event)
        seconds.append(time.thread_time() - began)

    FanOut.publish = measured
    try:
        yield seconds
    finally:
        FanOut.publish = publish


def used(process: psutil.Process) -> float:
    """Processor seconds of a process and its children, those that have ended included."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times) + times[0].children_user + times[0].children_system


async def read_again(api: Api, groups: Sequence[Sequence[str]], server: psutil.Process) -> float:
    """The server's processor seconds for reading the groups of a run once."""
    began = used(server)
    for _ in range(READS):
        for each in groups:
            await read_groups([api], each)
    return (used(server) - began) / READS


async def train(kinds: Sequence[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Train the quickstart's policy, `steps` steps with each sink -> processor seconds of the steps and of what each adds."""
    desk = Desk(folder / "desk.db")
    model = TrainableModel(name="traced", project="benchmark", base_model="tiny")
    await model.register(LocalBackend(dir=folder / "server"))
    options: dict[str, Any] = {
        "group_size": GROUP_SIZE,
        "scenarios_per_step": SCENARIOS_PER_STEP,
        "concurrency": GROUP_SIZE * SCENARIOS_PER_STEP,
        "config": partial(schedule, steps=1 + steps * len(kinds)),
    }
    agent, requests = trainable_agent(desk, model), desk.requests("train", TRAIN_REQUESTS, 0)
    await agent.atrain(requests, steps=1, **options)  # loads the learner and compiles, which is no step's own work
    rows: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds, start=1):
        goal = 1 + steps * number

        async def go_on(sink: MeasuredSink, goal: int = goal) -> None:
            await agent.atrain(requests, steps=goal, sinks=[cast(TraceSink, sink)], **options)

        rows.append({"sink": kind, "steps": steps, **await measured(kind, await model.api(), go_on)})
    return rows


async def measured(kind: str, api: Api, go_on: Callable[[MeasuredSink], Awaitable[None]]) -> dict[str, Any]:
    """What training with one sink took."""
    server = psutil.Process((await api.health()).pid)
    with collector(kind) as served, measured_publishing() as publishing:
        sink = MeasuredSink(sink_to(kind, served.url))
        client, serving = time.process_time(), used(server)
        await go_on(sink)
        client, serving = time.process_time() - client, used(server) - serving
        assert sink.seconds > 0, "the sink was not closed in time: the run ended before everything was delivered"
        reading = await read_again(api, sink.groups, server)
    own = sink.seconds + sum(publishing) + reading
    traces, spans, scores, broken = served.counts
    return {
        "client s": client - sink.seconds - sum(publishing),
        "server and learner s": serving - reading,
        "exporter's thread s": sink.seconds,
        "its reads in the server s": reading,
        "handing over s": sum(publishing),
        "share %": 100 * own / (client + serving - own),
        "traces": traces,
        "spans": spans,
        "scores": scores,
        "broken rules": len(broken),
    }


def export(kind: str, count: int) -> dict[str, Any]:
    """Seconds of exporting `count` sample rollouts of two model calls each."""
    rollouts = [sample_rollout(index) for index in range(count)]
    with collector(kind) as served:
        sink = sink_to(kind, served.url)
        wall, cpu = time.perf_counter(), time.process_time()
        for start in range(0, count, GROUPS_OF):
            several = tuple(rollouts[start : start + GROUPS_OF])
            show(sink, GroupsFinished("benchmark", "train", 0, (str(start),), several))
        sink.closed()
        seconds = {"wall s": time.perf_counter() - wall, "cpu s": time.process_time() - cpu}
    return {"sink": kind, "rollouts": count, **seconds, "spans": served.counts[1]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as Markdown; four digits after the point for what is less than a second."""
    shown = [[f"{v:.4f}" if isinstance(v, float) and v < 1 else f"{v:.2f}" if isinstance(v, float) else str(v)
              for v in row.values()] for row in rows]  # fmt: skip
    lines = [list(rows[0]), ["---"] * len(rows[0]), *shown]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(options: argparse.Namespace, trained: Sequence[dict[str, Any]], exported: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, with the machine."""
    parts = [
        "# What trace sinks cost\n",
        f"    {shlex.join(['python', 'benchmarks/trace_export.py', *sys.argv[1:]])}\n",
    ]
    parts.append(f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end, "
                 f"Python {platform.python_version()}.\n")  # fmt: skip
    if trained:
        highest = max(row["share %"] for row in trained)
        parts.append(f"{options.steps} steps of the quickstart with each sink. *share %*: the processor time of the sink's thread, of handing over "
                     "and of the reads in the server, against that of the client, the server and the learner without them. "
                     f"Goal: less than {SHARE:g} %; the highest is {highest:.2f} %.\n\n{table(trained)}\n")  # fmt: skip
    if exported:
        slowest = max(row["wall s"] for row in exported)
        parts.append(f"Sample rollouts of two model calls each. Goal for 1,280: less than {SECONDS:g} s; the slowest took {slowest:.2f} s "
                     f"for {options.rollouts:,}.\n\n{table(exported)}\n")  # fmt: skip
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="with each sink; 0: none")
    parser.add_argument("--rollouts", type=int, default=1280, help="0: none")
    parser.add_argument("--sinks", nargs="+", default=["langfuse", "otlp"], choices=["langfuse", "otlp"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/trace_export.md")
    options = parser.parse_args()
    trained: list[dict[str, Any]] = []
    if options.steps:
        with tempfile.TemporaryDirectory(prefix="traced-") as folder:
            os.environ["OFFBOOK_DIR"] = str(Path(folder, "notes"))
            trained = asyncio.run(train(options.sinks, options.steps, Path(folder)))
    exported = [export(kind, options.rollouts) for kind in options.sinks] if options.rollouts else []
    text = page(options, trained, exported)
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
