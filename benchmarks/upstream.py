"""What the gateway before a paid model adds to a call, and what it keeps when its parts fail.

    python benchmarks/upstream.py [--runs 5] [--waits 0.5 1.5] [--markdown FILE]

A scripted provider answers after 0.5 to 1.5 seconds, in a process of its own. 64 calls at a time go to it directly and through
`offbook serve --upstream` (every thread recorded), in turns that follow each other in a new random order. Milliseconds are
those beyond the provider's own. Added ones are differences of the two quantiles within one turn; the table has their medians
and ranges over turns. Then, under the same load, the sampler and the learner are killed, the database is locked, its disk is
made full (a limit on the size of files), and the server itself is killed, with clients that fall back to the provider: every
call must be answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import uvicorn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

LEVEL, CALLS = 64, 320
WAITS = (0.5, 1.5)
"""Seconds that the provider takes, drawn for each call: with equal ones, all calls would come back in one burst."""
WAIT_HEADER = "x-wait"
READY_SECONDS = 240.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def provide(port: int) -> None:
    """The scripted provider, until it is killed."""
    from tests.fakes.paid_api import PaidApi

    paid = PaidApi()
    paid.asked = type("Forgetful", (list,), {"append": lambda *_: None})()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await asyncio.sleep(float(dict(scope["headers"]).get(WAIT_HEADER.encode(), 0)))
        await paid(scope, receive, send)

    uvicorn.run(slow, port=port, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75)


@contextmanager
def running(command: list[str], ready: str, limit: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process, once its URL answers; ended at the end. `limit`: largest file in bytes."""

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
    process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=limited, start_new_session=True)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                answer = httpx.get(ready, trust_env=False)
                if "health" not in ready or answer.json()["status"] == "ok":
                    break
            except httpx.HTTPError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise SystemExit(f"{command}: not ready\n{log.read().decode()[-3000:]}")
            time.sleep(0.1)
        yield process
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def server(folder: Path, provider: int, port: int, *flags: str) -> list[str]:
    upstream = f"openai/gpt-4.1?api_base=http://127.0.0.1:{provider}/v1&prompt_price=2&completion_price=8"
    head = [sys.executable, "-m", "offbook.server", "--dir", str(folder), "--port", str(port), "--threads", "1"]
    return [*head, "--upstream", upstream, "--route", "desk", "--record-share", "1", *flags]


async def load(
    url: str,
    calls: int,
    name: str,
    during: Callable[[], object] | None = None,
    fallback: str | None = None,
    waits: Sequence[float] = WAITS,
) -> tuple[list[float], int]:
    """LEVEL calls at a time; the seconds that each took beyond the provider's wait, but for the first of each worker, which
    opens its connection; and how many were lost. `during` runs when a third of them is through."""
    left = iter(range(calls))
    extra: list[float] = []
    lost = 0
    begun = asyncio.Event()

    async def work(client: aiohttp.ClientSession) -> None:
        nonlocal lost
        opened = False
        for number in left:
            if number >= calls // 3:
                begun.set()
            body = {
                "model": "gpt-4.1",
                "messages": [{"role": "user", "content": f"{name} {number}: where is box 4821? " * 8}],
            }
            wait = random.Random(number).uniform(*waits)
            start = time.perf_counter()
            for where in [url, *([fallback] if fallback else [])]:
                try:
                    headers = {"x-offbook-thread": f"{name}-{number}", "authorization": "Bearer sk-own"}
                    headers[WAIT_HEADER] = str(wait)
                    async with client.post(f"{where}/v1/chat/completions", json=body, headers=headers) as answer:
                        answered = answer.status == 200 and "on its way" in await answer.text()
                    if answered:
                        extra.extend([time.perf_counter() - start - wait] if opened else [])
                        opened = True
                        break
                except aiohttp.ClientError:
                    continue
            else:
                lost += 1

    async def disturb() -> None:
        await begun.wait()
        if during is not None:
            await asyncio.to_thread(during)

    limits = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=LEVEL), timeout=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(LEVEL)), disturb())
    return extra, lost


def quantiles(extra: list[float]) -> tuple[float, float]:
    """Milliseconds at p50 and p99."""
    cuts = statistics.quantiles(extra, n=100)
    return 1e3 * cuts[49], 1e3 * cuts[98]


def compare(
    direct: str, gateway: str, runs: int, pid: int, waits: Sequence[float]
) -> tuple[list[dict[str, tuple[float, float]]], float]:
    """The quantiles of each way, turn by turn, after one warm-up; and the server's CPU milliseconds for a call."""
    order, turns, spent = random.Random(0), list[dict[str, tuple[float, float]]](), 0.0
    for run in range(-1, runs):
        turn: dict[str, tuple[float, float]] = {}
        for way in order.sample(["direct", "gateway"], 2):
            before = sum(psutil.Process(pid).cpu_times()[:2])
            extra, lost = asyncio.run(load(direct if way == "direct" else gateway, CALLS, f"{way}{run}", waits=waits))
            assert lost == 0
            turn[way] = quantiles(extra)
            if way == "gateway" and run >= 0:
                spent += sum(psutil.Process(pid).cpu_times()[:2]) - before
        turns += [turn] if run >= 0 else []
    return turns, 1e3 * spent / (runs * CALLS)


def child(process: subprocess.Popen[bytes], word: str) -> Callable[[], None]:
    def kill() -> None:
        for one in psutil.Process(process.pid).children():
            if any(word in part for part in one.cmdline()):
                one.kill()

    return kill


def lock(folder: Path) -> Callable[[], None]:
    def hold() -> None:
        other = sqlite3.connect(folder / "records.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        time.sleep(5)
        other.execute("ROLLBACK")
        other.close()

    return hold


def faults(provider: int, folder: Path) -> list[tuple[str, int, int]]:
    """What failed under load, the calls, and those that were lost."""
    direct, seen = f"http://127.0.0.1:{provider}", list[tuple[str, int, int]]()
    port = free_port()
    gateway = f"http://127.0.0.1:{port}/r/desk"

    def tried(what: str, during: Callable[[], object] | None, fallback: str | None = None) -> None:
        _, lost = asyncio.run(load(gateway, CALLS, what, during, fallback))
        seen.append((what, CALLS, lost))
        print(f"{what}: {lost} of {CALLS} calls lost", flush=True)

    with running(server(folder / "a", provider, port), f"http://127.0.0.1:{port}/health") as process:
        tried("sampler killed", child(process, "inference"))
        tried("learner killed", child(process, "learner"))
        tried("database locked for 5 s", lock(folder / "a"))
        tried("server killed, the client falls back to the provider", lambda: os.kill(process.pid, 9), direct)
    port = free_port()
    gateway = f"http://127.0.0.1:{port}/r/desk"
    command = server(folder / "b", provider, port, "--inference-only")
    with running(command, f"http://127.0.0.1:{port}/health", limit=600_000):
        tried("disk full", None)
        state = httpx.get(f"http://127.0.0.1:{port}/api/routes", trust_env=False).json()[0]
        print(json.dumps({name: state[name] for name in ("calls", "recorded", "not_recorded")}))
        if not state["not_recorded"]:
            raise SystemExit("the disk was not full: nothing failed to be recorded")
    return seen


def report(turns: list[dict[str, tuple[float, float]]], cpu: float, lost: list[tuple[str, int, int]]) -> str:
    lines = ["| call | direct, ms | through the gateway, ms | added, ms: median (range) |", "|---|---|---|---|"]
    for index, name in enumerate(("p50", "p99")):
        sides = [[turn[way][index] for turn in turns] for way in ("direct", "gateway")]
        added = [theirs - ours for ours, theirs in zip(*sides, strict=True)]
        shown = f"{statistics.median(added):+.1f} ({min(added):+.1f} to {max(added):+.1f})"
        lines.append(f"| {name} | {statistics.median(sides[0]):.1f} | {statistics.median(sides[1]):.1f} | {shown} |")
    lines += ["", f"The server's processor time for a call, with its recording: {cpu:.2f} ms."]
    lines += ["", "| under load | calls | lost |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {calls} | {gone} |" for what, calls, gone in lost)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--waits", type=float, nargs=2, default=WAITS, help="seconds that the provider takes, between two"
    )
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--provide", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.provide:
        return provide(options.provide)
    provider, port = free_port(), free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        running([sys.executable, __file__, "--provide", str(provider)], f"http://127.0.0.1:{provider}/v1/models"),
    ):
        command = server(Path(folder, "m"), provider, port)
        with running(command, f"http://127.0.0.1:{port}/health") as process:
            route = f"http://127.0.0.1:{port}/r/desk"
            turns, cpu = compare(f"http://127.0.0.1:{provider}", route, options.runs, process.pid, options.waits)
        table = report(turns, cpu, faults(provider, Path(folder)))
    print(table)
    if options.markdown:
        text = options.markdown.read_text("utf-8")
        head = text.partition("<!-- measured -->")[0]
        options.markdown.write_text(f"{head}<!-- measured -->\n\n{table}\n", "utf-8")


if __name__ == "__main__":
    main()
