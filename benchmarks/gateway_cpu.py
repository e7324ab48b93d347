"""Computing time of the gateway per call: whole calls of 64 tokens, streamed calls of 256, streamed in each API.

    python benchmarks/gateway_cpu.py [--against COMMIT] [--runs 7] [--write]

The gateway stands in front of a vLLM that computes nothing (scripted_vllm.py): whole answers after 50 ms, streams at 100 tokens a
second. `--against` starts a second gateway from a git worktree of that commit, in front of the same vLLM; the two take turns in a
new random order. What is measured is processor time of the gateway's process, not time on the clock, so that other work on the
machine matters little. Every call is recorded. The ratio is the median over pairs of turns that follow each other; other APIs are
compared with the chat completions of the same round. `--write` puts the tables into benchmarks/results/gateway.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from vllm_and_gateway import await_health, free_ports

from offbook.tiny import path as tiny_policy

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "gateway.md"
HEADING = "## Computing time of a call, and of each API beside chat"
NOW = "now"
SEED = 0


@dataclass(frozen=True)
class Kind:
    """Calls of one kind: `count` in a turn, `level` at a time."""

    name: str
    tokens: int
    level: int
    count: int
    streamed: bool = False
    tools: bool = False
    api: str = "chat"


KINDS = (
    Kind("whole, 64 tokens", 64, 1, 40),
    Kind("whole, 64 tokens", 64, 16, 320),
    Kind("streamed, 256 tokens", 256, 1, 2, streamed=True),
    Kind("streamed, 256 tokens", 256, 32, 64, streamed=True),
    Kind("streamed, 256 tokens, with a tool", 256, 32, 64, streamed=True, tools=True),
    *(
        Kind("streamed, 256 tokens, with a tool", 256, 32, 64, streamed=True, tools=True, api=api)
        for api in ("messages", "responses", "gemini")
    ),
)
TEXT = "look at it again and tell me what you found there " * 3
LOOK = {"name": "look"}
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": LOOK | {"parameters": SCHEMA}}
MESSAGES = [{"role": "user", "content": TEXT}]


def request(kind: Kind) -> tuple[str, dict[str, Any], bytes]:
    """Path and body of a call, and what its answer ends with."""
    stream = {"stream": kind.streamed}
    match kind.api:
        case "messages":
            tools = [LOOK | {"input_schema": SCHEMA}]
            body = {"model": "default", "messages": MESSAGES, "max_tokens": kind.tokens, "tools": tools} | stream
            return "/v1/messages", body, b'{"type":"message_stop"}\n\n'
        case "responses":
            tools = [LOOK | {"type": "function", "parameters": SCHEMA}]
            body = {"model": "default", "input": TEXT, "max_output_tokens": kind.tokens, "tools": tools} | stream
            return "/v1/responses", body, b"}\n\n"
        case "gemini":
            tools = [{"functionDeclarations": [LOOK | {"parametersJsonSchema": SCHEMA}]}]
            body = {"contents": [{"role": "user", "parts": [{"text": TEXT}]}], "tools": tools}
            body |= {"generationConfig": {"maxOutputTokens": kind.tokens}}
            return "/v1beta/models/default:streamGenerateContent?alt=sse", body, b"}\n\n"
        case _:
            body = {"model": "default", "messages": MESSAGES, "max_tokens": kind.tokens, "ignore_eos": True} | stream
            body |= {"tools": [TOOL]} if kind.tools else {}
            return "/v1/chat/completions", body, b"data: [DONE]\n\n" if kind.streamed else b"}"


@dataclass(frozen=True)
class Gateway:
    """A running gateway of one commit."""

    url: str
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """Processor time of all its threads, in nanoseconds where Linux tells it."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        if tasks.exists():
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        used = self.process.cpu_times()
        return used.user + used.system


async def burst(url: str, kind: Kind) -> None:
    """One turn: `count` calls, `level` at a time."""
    left = iter(range(kind.count))
    path, body, end = request(kind)
    headers = {"x-offbook-record": "1"}

    async def work(client: aiohttp.ClientSession) -> None:
        for _ in left:
            async with client.post(f"{url}{path}", json=body, headers=headers) as answer:
                content = [piece async for piece in answer.content.iter_any()]
                whole = b"".join(content)
                if answer.status != 200 or not whole.endswith(end) or whole.count(b" t") < kind.tokens:
                    raise SystemExit(f"status {answer.status}: {whole[-500:]!r}")

    connector = aiohttp.TCPConnector(limit=kind.level)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as client:
        await asyncio.gather(*(work(client) for _ in range(kind.level)))


def measure(gateways: dict[str, Gateway], runs: int) -> dict[Kind, dict[str, list[float]]]:
    """Milliseconds per call of each kind and commit, one for each turn; a first turn of each is left out."""
    order = random.Random(SEED)
    found = {kind: {name: list[float]() for name in gateways} for kind in KINDS}
    for run in range(-1, runs):
        for kind in KINDS:
            for name in order.sample(list(gateways), len(gateways)):
                before = gateways[name].cpu_seconds()
                asyncio.run(burst(gateways[name].url, kind))
                if run >= 0:
                    found[kind][name].append(1e3 * (gateways[name].cpu_seconds() - before) / kind.count)
        print(".", end="", flush=True)
    print()
    return found


def report(found: dict[Kind, dict[str, list[float]]], against: str | None) -> str:
    """A Markdown table: medians with the least and the most, and ratios of turns that follow each other."""
    before = f"commit {against}, CPU ms | " if against else ""
    lines = [f"| calls | at a time | {before}now, CPU ms |" + (" now to then |" if against else "")]
    lines.append("|---|---|" + "---|" * (3 if against else 1))
    for kind, by_name in found.items():
        cells = [_spread(by_name[name], 2) for name in ([against] if against else []) + [NOW]]
        if against:
            pairs = zip(by_name[NOW], by_name[against], strict=True)
            cells.append(_spread([now / then for now, then in pairs], 2))
        name = kind.name if kind.api == "chat" else f"{kind.name}, {kind.api}"
        lines.append(f"| {name} | {kind.level} | " + " | ".join(cells) + " |")
    lines += ["", "| API | CPU of a streamed token above chat's, µs |", "|---|---|"]
    for kind, by_name in found.items():
        if kind.api != "chat":
            pairs = zip(by_name[NOW], found[replace(kind, api="chat")][NOW], strict=True)
            lines.append(f"| {kind.api} | {_spread([1e3 * (own - chat) / kind.tokens for own, chat in pairs], 1)} |")
    return "\n".join(lines)


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", str(folder), commit], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


@contextmanager
def started(
    checkouts: dict[str, Path], folder: Path, vllms: int = 1
) -> Iterator[tuple[dict[str, Gateway], list[psutil.Process]]]:
    """One gateway of each checkout in front of the same scripted vLLMs, and the processes of these."""
    base = tiny_policy()
    ports = free_ports(vllms + len(checkouts))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, url: str, checkout: Path, words: list[str]) -> psutil.Process:
        paths = os.pathsep.join(str(checkout / part) for part in ("src", "integrations"))
        with (folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, *words]
            environment = os.environ | {"PYTHONPATH": paths}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder))
        await_health(url, processes[-1], folder / f"{name}.log")
        return psutil.Process(processes[-1].pid)

    try:
        script = str(Path(__file__).with_name("scripted_vllm.py"))
        samplers = [
            start(f"vllm-{port}", f"http://127.0.0.1:{port}", ROOT, [script, str(port)]) for port in ports[:vllms]
        ]
        found: dict[str, Gateway] = {}
        for (name, checkout), url, port in zip(checkouts.items(), urls[vllms:], ports[vllms:], strict=True):
            words = ["-m", "offbook.server", "--model", str(base), "--vllm-url", ",".join(urls[:vllms])]
            words += ["--inference-only", "--port", str(port), "--dir", str(folder / f"dir-{name}")]
            found[name] = Gateway(url, start(name, url, checkout, words))
        yield found, samplers
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


@contextmanager
def beside(commit: str | None, folder: Path) -> Iterator[dict[str, Path]]:
    """This checkout, and with `commit` a second one of that commit before it."""
    if commit is None:
        yield {NOW: ROOT}
        return
    with worktree(commit, folder / "earlier") as earlier:
        yield {commit: earlier, NOW: ROOT}


def write(table: str, command: str) -> None:
    """Replace the section of this benchmark in the results."""
    text = RESULTS.read_text(encoding="utf-8")
    before, _, rest = text.partition(HEADING)
    _, mark, after = rest.partition("\n## ")
    section = f"{HEADING}\n\n    {command}\n\n{(__doc__ or '').split(chr(10) * 2, 2)[2].strip()}\n\n{table}\n"
    RESULTS.write_text(before.rstrip() + "\n\n" + section + (mark + after if mark else ""), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="a second gateway, from this commit")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gateway-cpu-") as name:
        folder = Path(name)
        with beside(options.against, folder) as checkouts, started(checkouts, folder) as (gateways, _):
            found = measure(gateways, options.runs)
    table = report(found, options.against)
    print(table)
    if options.write:
        against = f" --against {options.against}" if options.against else ""
        write(table, f"python benchmarks/gateway_cpu.py{against} --runs {options.runs} --write")


if __name__ == "__main__":
    main()
