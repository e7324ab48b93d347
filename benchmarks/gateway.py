"""Offbook's endpoint in front of vLLM against that vLLM itself: throughput, and what a call waits for it.

    python benchmarks/gateway.py [--runs 5] [--json FILE] [--scripted]

64-token calls of about 60 prompt tokens each, whole and streamed, 1, 16 and 64 at a time. Direct and through the gateway take turns
on one vLLM process, in a new random order each time: the machine's pace changes within a minute, and what came
before matters. Ratios of throughput, and what is added to single calls, are medians over turns that follow each other.
Through the gateway every call is recorded; "direct, with ids" asks vLLM for the token ids and logprobs that a record needs,
so that its own part of the price is seen. "CPU" is computing time per call. With the tiny policy tokens cost almost nothing,
which is the worst case. A real vLLM's calls differ by more than the gateway adds: `--scripted` puts it in front of one that
answers after 50 ms whatever it is asked, whole calls only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from vllm_and_gateway import Both, both

from offbook.tiny import path as tiny_policy

TOKENS = 64
WAYS = ("direct", "direct, with ids", "gateway")
LEVELS = {1: (1, 30), 16: (64, 6), 64: (128, 4)}
SCRIPTED = {1: (1, 150), 16: (320, 8), 64: (640, 4)}
"""Calls at a time -> calls of one turn, and turns of one run. Single calls alternate one by one."""
SEED = 0


@dataclass
class Runs:
    """Of one way at one level. `rates`: calls per second of each turn; `waits`: seconds of each call; `cpu`: per call."""

    rates: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])
    cpu: dict[str, float] = field(default_factory=dict[str, float])


async def burst(url: str, way: str, level: int, calls: int, streamed: bool, run: int) -> list[float]:
    """The calls of one turn, `level` at a time; the seconds of each."""
    left = iter(range(calls))
    waits: list[float] = []
    headers = {"x-offbook-record": "1"} if way == "gateway" else {}
    limits = httpx.Limits(max_connections=level, max_keepalive_connections=level)

    async def work(client: httpx.AsyncClient) -> None:
        for number in left:
            text = f"{way} {run} {number}: " + "look at it again and tell me what you found there " * 3
            body = {"model": "default" if way == "gateway" else "base", "messages": [{"role": "user", "content": text}]}
            body |= {"max_tokens": TOKENS, "ignore_eos": True, "stream": streamed}
            if way == "direct, with ids":
                body |= {"return_token_ids": True, "logprobs": True}
            began = time.perf_counter()
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                size = sum([len(piece) async for piece in answer.aiter_raw()])
            if answer.status_code != 200 or size < TOKENS:
                raise SystemExit(f"{way}: status {answer.status_code}, {size} bytes")
            waits.append(time.perf_counter() - began)

    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(work(client) for _ in range(level)))
    return waits


def measure(
    servers: Both, runs: int, kinds: tuple[bool, ...], levels: dict[int, tuple[int, int]]
) -> dict[tuple[bool, int, str], Runs]:
    """Every way at every level, in turn; one warm-up. `kinds`: whole (False), streamed (True)."""
    keys = [(streamed, level, way) for streamed in kinds for level in levels for way in WAYS]
    found = {key: Runs() for key in keys}
    order = random.Random(SEED)
    for streamed in kinds:
        for level, (calls, turns) in levels.items():
            for run in range(-1, runs * turns):
                for way in order.sample(WAYS, len(WAYS)):
                    url = servers.gateway if way == "gateway" else servers.vllm
                    before, began = servers.cpu_seconds(), time.perf_counter()
                    waits = asyncio.run(burst(url, way, level, calls, streamed, run))
                    took = time.perf_counter() - began
                    if run < 0:
                        continue
                    into = found[streamed, level, way]
                    into.rates.append(len(waits) / took)
                    into.waits += waits
                    for name, value in servers.cpu_seconds().items():
                        into.cpu[name] = into.cpu.get(name, 0.0) + (value - before[name]) / (calls * turns * runs)
            print(".", end="", flush=True)
    print()
    return found


def paced(runs: Runs, to: Runs) -> float:
    """Throughput as a ratio: the median over turns that follow each other."""
    return statistics.median(ours / theirs for ours, theirs in zip(runs.rates, to.rates, strict=True))


def added(runs: Runs, to: Runs, *, paired: bool) -> float:
    """Seconds that a call takes more: the median over pairs, or the medians' difference."""
    if paired:
        return statistics.median(ours - theirs for ours, theirs in zip(runs.waits, to.waits, strict=True))
    return statistics.median(runs.waits) - statistics.median(to.waits)


def report(found: dict[tuple[bool, int, str], Runs]) -> str:
    """Two Markdown tables."""
    lines = [
        "| answer | at a time | way | calls/s, median (least to most) | of direct | of direct, with ids | median call ms "
        "| added to direct, ms | added to direct, with ids, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    spent = [
        "| answer | at a time | way | " + " | ".join(f"{name}, CPU ms" for name in found[False, 1, "direct"].cpu) + " |"
    ]
    spent.append("|---|---|---|" + "---|" * len(found[False, 1, "direct"].cpu))
    for (streamed, level, way), runs in found.items():
        others = [found[streamed, level, other] for other in WAYS[:2]]
        rate, wait = statistics.median(runs.rates), statistics.median(runs.waits)
        ratios = " | ".join(f"{paced(runs, other):.2f}" for other in others)
        more = " | ".join(f"{1e3 * added(runs, other, paired=level == 1):+.1f}" for other in others)
        kind = "streamed" if streamed else "whole"
        spread = f"{rate:.1f} ({min(runs.rates):.1f} to {max(runs.rates):.1f})"
        lines.append(f"| {kind} | {level} | {way} | {spread} | {ratios} | {1e3 * wait:.1f} | {more} |")
        spent.append(f"| {kind} | {level} | {way} | " + " | ".join(f"{1e3 * v:.1f}" for v in runs.cpu.values()) + " |")
    return "\n".join([*lines, "", *spent])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=tiny_policy())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scripted", action="store_true", help="in front of a vLLM that computes nothing")
    options = parser.parse_args()
    with both(options.model, scripted=options.scripted) as servers:
        if options.scripted:
            found = measure(servers, options.runs, (False,), SCRIPTED)
        else:
            found = measure(servers, options.runs, (False, True), LEVELS)
    print(report(found))
    if options.json:
        rows = [
            {"streamed": streamed, "level": level, "way": way, **vars(runs)}
            for (streamed, level, way), runs in found.items()
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
