"""The dashboard's pages over many trajectories: time on the server and size of the answer.

    python benchmarks/dashboard.py            # 10,000 and 100,000 trajectories
    python benchmarks/dashboard.py 10000      # as many

The records are written through the server's own store: trajectories of three calls each with tokens, in groups of 8 and
steps of 128, with a train request for each step. Each page is asked for in the process that serves it, so that no network
is in the numbers. Beside the time that passes stands that of the processor: on a machine with other work they are far apart.
Writes benchmarks/results/dashboard.md.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx

from offbook.base.config import TrainConfig
from offbook.base.types import Call, CallOutput, CallStatus, RolloutException, RolloutPlace, Sampling, TrainResult
from offbook.base.wire import GroupRecord, LogRequest, TrainRequest, TrainStatus, TrajectoryRecord
from offbook.server.http.auth import Guard
from offbook.server.records.database import open_records
from offbook.server.records.store import Store
from offbook_dashboard.source import DashboardSource
from offbook_dashboard.viewer import build_viewer

RESULTS = Path(__file__).parent / "results" / "dashboard.md"
SIZES = (10_000, 100_000)
GROUP, STEP, RUN_STEPS = 8, 128, 40
REPEATS = 20
BEGAN = 1_700_000_000.0
METRICS = ("entropy", "loss/value", "kl/sampler_learner", "kl/base", "clip_fraction", "tokens/trained", "seconds/total",
           "tokens/computed", "tokens/plain_rows", "groups/no_spread", "groups/dropped_too_few", "groups/total",
           "groups/trained", "seconds/update", "sampler/swap_seconds", *(f"more/{number}" for number in range(60)))  # fmt: skip
PAGES = {
    "runs": "/",
    "run": "/runs/run-0",
    "a run's data": "/pages/data/runs/run-0",
    "compare six runs": "/compare?" + "&".join(f"run=run-{number}" for number in range(6)),
    "step": "/runs/run-0/steps/3",
    "group": "/runs/run-0/steps/3/groups/g-51",
    "rollout": "/trajectories/t-400",
}


def calls_of(name: str, rng: random.Random, at: float) -> list[Call]:
    """Three calls of a conversation that grows, the second with a tool call."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You are a support agent for a bike shop. Use the tools. " * 4},
        {
            "role": "user",
            "content": f"Order {rng.randrange(10_000)}: the helmet arrived cracked. I want my money back.",
        },
    ]
    calls: list[Call] = []
    for number in range(3):
        tool = {"id": f"c{number}", "type": "function", "function": {"name": "get_order", "arguments": '{"id": 5512}'}}
        message: dict[str, object] = {"role": "assistant", "content": "I look it up before I promise anything. " * 3}
        if number == 1:
            message["tool_calls"] = [tool]
        tokens = tuple(rng.randrange(32_000) for _ in range(60))
        output = CallOutput(index=0, token_ids=tokens, logprobs=(-0.5,) * 60, message=message, finish_reason="stop")
        calls.append(
            Call(
                id=f"{name}-call-{number}", trajectory_id=name, model="clerk", step=0, status=CallStatus.COMPLETE,
                sampling=Sampling(), messages=tuple(messages), tools=None, prompt_ids=tuple(range(300 + 100 * number)),
                outputs=(output,), started_at=at + number, ended_at=at + number + 0.8,
            )
        )  # fmt: skip
        messages = [*messages, message, {"role": "tool", "tool_call_id": "c1", "content": '{"delivered": "yesterday"}'}]
    return calls


async def write(store: Store, count: int) -> None:
    """The records, a step at a time."""
    rng = random.Random(0)
    for begin in range(0, count, STEP):
        number = begin // STEP
        run, step, at = f"run-{number // RUN_STEPS}", number % RUN_STEPS, BEGAN + 60.0 * number
        records: list[TrajectoryRecord] = []
        calls: list[Call] = []
        for index in range(begin, min(begin + STEP, count)):
            name = f"t-{index}"
            calls += calls_of(name, rng, at)
            failed = rng.random() < 0.01
            error = RolloutException(type="ToolError", message="the till is shut", traceback="Traceback ...")
            records.append(
                TrajectoryRecord(
                    id=name, model="clerk", reward=None if failed else float(rng.random() < 0.5),
                    metrics={"success": 1.0, "duration": 3.0}, exception=error if failed else None,
                    started_at=at, ended_at=at + 3.5,
                    place=RolloutPlace(run=run, split="train", step=step, scenario=f"order-{index // GROUP}",
                                       group=f"g-{index // GROUP}", index=index % GROUP),
                )
            )  # fmt: skip
        await asyncio.gather(*(store.add_call(call) for call in calls))
        await store.finish(records)
        ids = [record.id for record in records]
        groups = tuple(GroupRecord(trajectory_ids=tuple(ids[at : at + GROUP])) for at in range(0, len(ids), GROUP))
        request = TrainRequest(id=f"train-{number}", model="clerk", groups=groups, config=TrainConfig())
        metrics = {name: rng.random() for name in METRICS} | {"reward/mean": rng.random(), "reward/std": 0.4}
        result = TrainResult(model="clerk", step=step + 1, applied=True, metrics=metrics, request_id=request.id)
        status = TrainStatus(id=request.id, model="clerk", state="done", result=result)
        await store.save_train(status, request.model_dump_json())
        if number % 10 == 0:
            entry = LogRequest(split="val", step=step, metrics={"val/success": rng.random()}, trajectory_ids=(ids[0],))
            await store.add_log("clerk", entry)


class Row(NamedTuple):
    """A page: milliseconds that passed the first time, p95 of the others, p95 of the processor's, bytes."""

    page: str
    first: float
    passed: float
    processor: float
    size: int


async def measure(folder: Path) -> list[Row]:
    """Every page of PAGES. Ends the program where one does not answer."""
    records = open_records(folder)
    app = build_viewer(DashboardSource(records, folder), Guard(None))
    rows: list[Row] = []
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:
        for name, path in PAGES.items():
            times: list[float] = []
            used: list[float] = []
            size = 0
            for _ in range(REPEATS + 1):
                began, ran = time.perf_counter(), time.process_time()
                answer = await client.get(path)
                times.append((time.perf_counter() - began) * 1000)
                used.append((time.process_time() - ran) * 1000)
                size = len(answer.content)
                if answer.status_code != 200:
                    raise SystemExit(f"{path} answered {answer.status_code}: {answer.text[:500]}")
            rows.append(Row(name, times[0], p95(times[1:]), p95(used[1:]), size))
    records.close()
    return rows


def p95(values: list[float]) -> float:
    return sorted(values)[round(0.95 * len(values)) - 1]


def run(count: int) -> list[Row]:
    """Write and measure in a folder of its own."""

    async def written(folder: Path) -> None:
        store = await Store.open(folder / "records.db")
        await write(store, count)
        await store.close()

    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        asyncio.run(written(Path(name)))
        size = (Path(name) / "records.db").stat().st_size / 2**20
        print(f"{count:,} trajectories: {size:,.0f} MiB, written in {time.perf_counter() - began:.0f} s", flush=True)
        return asyncio.run(measure(Path(name)))


def table(found: dict[int, list[Row]]) -> str:
    counts = list(found)
    head = ["page", *(f"{count:,}: first, p95, processor (ms)" for count in counts), "KiB"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    by_count = {count: {row.page: row for row in rows} for count, rows in found.items()}
    for name in by_count[counts[0]]:
        rows = [by_count[count][name] for count in counts]
        cells = [f"{row.first:.0f}, {row.passed:.0f}, {row.processor:.0f}" for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} | {rows[-1].size / 1024:.0f} |")
    return "\n".join(lines)


def write_results(found: dict[int, list[Row]]) -> None:
    """The table so far, with the machine that it is of."""
    command = " ".join(["python benchmarks/dashboard.py", *sys.argv[1:]])
    load, cores = os.getloadavg()[0], os.cpu_count()
    RESULTS.write_text(
        f"# The dashboard over many trajectories\n\n`{command}`: milliseconds on the server, without a network; three calls a "
        "trajectory, SQLite. *first* is the first\ntime that a process shows the page, *p95* what passed in 20 further times, "
        "*processor* the p95 of the processor's time."
        f"\n{platform.machine()}, {cores} cores, load average {load:.1f}, Python {platform.python_version()}. With a load above "
        f"the number of cores, *p95* is what other work leaves.\n\n{table(found)}\n",
        encoding="utf-8",
    )


def main() -> None:
    chosen = tuple(int(word) for word in sys.argv[1:]) or SIZES
    found: dict[int, list[Row]] = {}
    for count in chosen:
        found[count] = run(count)
        write_results(found)  # what is measured stays where a larger count is broken off
    print(table(found))


if __name__ == "__main__":
    main()
