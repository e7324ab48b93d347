"""Half an hour of 1,000 rollouts at once, against scripted vLLMs of which one is killed now and then: memory, latency, lost calls.

    python benchmarks/soak.py [--minutes 30] [--rollouts 1000] [--table benchmarks/results/soak.md]

Each rollout makes three calls of 64 tokens and is finished with a reward; the next one begins. The scripted vLLMs answer after a fixed
time, so that what changes is the server's. Every call carries an idempotency key and is sent again until it is answered; at the
end each answered call is looked up in the records. The goals: memory grows by less than 1 MB a minute after the first sixth of the time, the
95th percentile of the latency of the last sixth is at most 1.3 times that of the second, and no call is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from vllm_and_gateway import await_health, free_ports

from offbook.tiny import path as tiny_policy

CALLS = 3
TOKENS = 64
VLLMS = 2
MEASURED_EVERY = 2.0
GOALS = (1.0, 1.3, 0)
"""MB a minute, the ratio of the 95th percentiles, lost calls."""


@dataclass
class Measured:
    """`memory`: (seconds, MB of the server); `waits`: (seconds, seconds of a call); `answered`: ids of calls."""

    memory: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    waits: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    answered: list[str] = field(default_factory=list[str])
    rollouts: int = 0
    sent_again: int = 0
    kills: int = 0
    lost: int = 0

    def slope(self, after: float) -> float:
        """Growth of the memory in MB a minute, by least squares."""
        times, sizes = zip(*((at / 60, size) for at, size in self.memory if at >= after), strict=True)
        return statistics.linear_regression(times, sizes).slope

    def p95(self, start: float, end: float) -> float:
        waits = [wait for at, wait in self.waits if start <= at < end]
        return statistics.quantiles(waits, n=20)[-1] if len(waits) > 1 else float("nan")


class Soak:
    """The processes, and the clients in this one."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.seconds = 60.0 * options.minutes
        self.options = options
        self.found = Measured()
        self._random = random.Random(options.seed)
        self._ports = free_ports(VLLMS + 1)
        self._vllms: list[subprocess.Popen[bytes]] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[-1]}"

    def start(self) -> None:
        urls = [f"http://127.0.0.1:{port}" for port in self._ports[:-1]]
        self._vllms = [self._vllm(number) for number in range(VLLMS)]
        for url, process in zip(urls, self._vllms, strict=True):
            await_health(url, process, self.folder / "vllm.log")
        words = ["-m", "offbook.server", "--model", str(tiny_policy()), "--vllm-url", ",".join(urls)]
        words += ["--port", str(self._ports[-1]), "--dir", str(self.folder / "dir"), "--inference-only"]
        self._server = self._process(words, "server.log")
        await_health(self.url, self._server, self.folder / "server.log")

    def end(self) -> None:
        for process in [*self._vllms, *([self._server] if self._server else [])]:
            process.kill()
            process.wait()

    def _vllm(self, number: int) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("scripted_vllm.py"))
        return self._process([script, str(self._ports[number]), str(self.options.seconds)], "vllm.log")

    def _process(self, words: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen([sys.executable, *words], stdout=output, stderr=output)

    # ---- load

    async def run(self) -> None:
        self._began = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as http:
            work = [self._rollouts(http, place) for place in range(self.options.rollouts)]
            others = [asyncio.create_task(self._watch()), asyncio.create_task(self._kill())]
            await asyncio.gather(*work)
            for task in others:
                task.cancel()
        self.found.lost = self._lost()

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _rollouts(self, http: aiohttp.ClientSession, place: int) -> None:
        await asyncio.sleep(self._random.random() * self.options.seconds)  # not all at the same moment
        for number in itertools.count():
            if self._now() >= self.seconds:
                return
            trajectory = f"soak-{place}-{number}"
            for turn in range(CALLS):
                headers = {"x-offbook-trajectory": trajectory, "idempotency-key": f"{trajectory}-{turn}"}
                text = f"{trajectory} {turn}: look at it again and tell me what you found there"
                body = {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
                began = self._now()
                answer = await self._sent(http, "/v1/chat/completions", body, headers)
                self.found.waits.append((began, self._now() - began))
                self.found.answered.append(answer["choices"][0]["offbook"]["call_id"])
            record = {"id": trajectory, "model": "default", "reward": 1.0, "started_at": 1.0, "ended_at": 2.0}
            await self._sent(http, "/api/trajectories", {"trajectories": [record]}, {})
            self.found.rollouts += 1

    async def _sent(self, http: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str]) -> Any:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with http.post(path, json=body, headers=headers) as answer:
                    if answer.status == 200:
                        return await answer.json()
                    if answer.status < 500 and answer.status != 429:
                        raise SystemExit(f"{path}: {answer.status} {await answer.text()}")
            self.found.sent_again += 1
            await asyncio.sleep(0.5)

    async def _watch(self) -> None:
        assert self._server is not None
        server = psutil.Process(self._server.pid)
        while True:
            self.found.memory.append((self._now(), server.memory_info().rss / 2**20))
            await asyncio.sleep(MEASURED_EVERY)

    async def _kill(self) -> None:
        """One of the vLLMs at a time, by signal 9; it is started again a few seconds later."""
        while True:
            await asyncio.sleep(self.options.kill_every * (0.5 + self._random.random()))
            number = self._random.randrange(VLLMS)
            self._vllms[number].send_signal(signal.SIGKILL)
            self._vllms[number].wait()
            self.found.kills += 1
            await asyncio.sleep(3)
            self._vllms[number] = self._vllm(number)

    def _lost(self) -> int:
        with closing(sqlite3.connect(f"file:{self.folder / 'dir' / 'records.db'}?mode=ro", uri=True)) as records:
            kept = {name for (name,) in records.execute("SELECT call_id FROM outputs")}
        return sum(call not in kept for call in self.found.answered)


def report(soak: Soak, command: str) -> str:
    """Markdown: what was measured, beside the goals."""
    found, sixth, options = soak.found, soak.seconds / 6, soak.options
    early, late = found.p95(sixth, 2 * sixth), found.p95(soak.seconds - sixth, soak.seconds)
    rows = [
        ("memory of the server after the first sixth, MB a minute", f"{found.slope(sixth):+.2f}", f"below {GOALS[0]}"),
        ("95th percentile of a call, last sixth to second sixth", f"{late / early:.2f}", f"at most {GOALS[1]}"),
        ("answered calls that are not in the records", f"{found.lost}", f"{GOALS[2]}"),
        ("memory at the start of the second sixth, and at the end, MB", _memory(found, sixth), ""),
        ("95th percentile of a call, second sixth and last sixth, s", f"{early:.2f}, {late:.2f}", ""),
        ("calls answered", f"{len(found.answered)} ({len(found.answered) / soak.seconds:.0f} a second)", ""),
        ("rollouts finished", f"{found.rollouts}", ""),
        ("vLLMs killed", f"{found.kills}", ""),
        ("requests sent again", f"{found.sent_again}", ""),
    ]
    lines = [
        "# A soak",
        "",
        f"    {command}",
        "",
        f"{options.rollouts} rollouts at once for {options.minutes:g} minutes against {VLLMS} scripted vLLMs that answer after "
        f"{options.seconds:g} s,",
        f"one of them killed with signal 9 every {options.kill_every:g} s or so. Clients, server and scripted vLLMs share the machine.",
        "",
        "| what | measured | goal |",
        "|---|---|---|",
        *(f"| {what} | {value} | {goal} |" for what, value, goal in rows),
    ]
    return "\n".join(lines) + "\n"


def _memory(found: Measured, after: float) -> str:
    sizes = [size for at, size in found.memory if at >= after]
    return f"{sizes[0]:.0f}, {sizes[-1]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long a scripted vLLM takes for an answer")
    parser.add_argument("--kill-every", type=float, default=45.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="write what was measured to this Markdown file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), options)
        try:
            soak.start()
            asyncio.run(soak.run())
        finally:
            soak.end()
    text = report(soak, " ".join(["python benchmarks/soak.py", *sys.argv[1:]]))
    print(text)
    if options.table is not None:
        options.table.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
