"""Where a pool of vLLMs sends the turns of trajectories: prefixes met again, groups together, balance, a vLLM killed, and CPU.

    python benchmarks/routing.py [--against COMMIT] [--runs 5] [--write]

Four vLLMs that compute nothing (scripted_vllm.py: 50 ms a call), the server in front of all (`--vllm-url a,b,c,d`): 24 scenarios
in groups of 8 rollouts of 6 turns, all at once, every call recorded. `--against` starts a second server from a git worktree of
that commit before the same vLLMs; both take turns in a random order. CPU is the processor time of the server's process by
call; the difference is the median over pairs of turns that follow each other. At the end one vLLM is killed with signal 9
while the rollouts of another turn run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import psutil
from gateway_cpu import NOW, SEED, Gateway, beside, started

RESULTS = Path(__file__).parent / "results" / "routing.md"
VLLMS, SCENARIOS, GROUP, TURNS = 4, 24, 8, 6
KILLED_AFTER = 0.4
"""Of the calls of a turn, the part after which a vLLM is killed."""


@dataclass
class Turn:
    """Which vLLM answered the calls of each rollout, in order, and what failed."""

    served: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    failed: list[str] = field(default_factory=list[str])
    cpu_ms: float = 0.0

    @property
    def calls(self) -> int:
        return sum(map(len, self.served.values()))

    @property
    def same(self) -> float:
        """The share of turns that met the vLLM of the turn before."""
        pairs = [pair for ports in self.served.values() for pair in pairwise(ports)]
        return sum(a == b for a, b in pairs) / len(pairs)

    @property
    def moves(self) -> int:
        return sum(a != b for ports in self.served.values() for a, b in pairwise(ports))

    @property
    def spread(self) -> float:
        """On how many vLLMs a group begins, at the mean."""
        groups: dict[str, set[str]] = {}
        for name, ports in self.served.items():
            groups.setdefault(name.rpartition("-")[0], set()).add(ports[0])
        return statistics.mean(map(len, groups.values()))

    @property
    def busiest(self) -> float:
        """The calls of the busiest vLLM to their mean."""
        return max(Counter(port for ports in self.served.values() for port in ports).values()) * VLLMS / self.calls


async def rollouts(gateway: Gateway, prefix: str, killed: psutil.Process | None = None) -> Turn:
    """All rollouts at once; `killed` is ended in their middle."""
    turn = Turn()
    before = gateway.cpu_seconds()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=300)) as client:

        async def rollout(scenario: int, number: int) -> None:
            name = f"{prefix}-{scenario}-{number}"
            messages = [{"role": "system", "content": "You are an agent. " * 20}]
            messages.append({"role": "user", "content": f"{prefix}: scenario {scenario} " + "word " * 200})
            for index in range(TURNS):
                body = {"model": "default", "messages": messages, "max_tokens": 16}
                headers = {"x-offbook-trajectory": name}
                async with client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
                    answer = await response.json()
                if response.status != 200:
                    turn.failed.append(f"{name}: {answer}")
                    return
                turn.served.setdefault(name, []).append(answer["system_fingerprint"])
                if killed is not None and turn.calls == int(KILLED_AFTER * SCENARIOS * GROUP * TURNS):
                    killed.kill()
                reply = answer["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"result {index}"}]

        await asyncio.gather(*(rollout(scenario, number) for scenario in range(SCENARIOS) for number in range(GROUP)))
    turn.cpu_ms = 1e3 * (gateway.cpu_seconds() - before) / max(1, turn.calls)
    return turn


async def measure(gateways: dict[str, Gateway], vllms: list[psutil.Process], runs: int) -> list[str]:
    """The rows of the table."""
    order = random.Random(SEED)
    turns = {name: list[Turn]() for name in gateways}
    for run in range(-1, runs):
        for name in order.sample(list(gateways), len(gateways)):
            turn = await rollouts(gateways[name], f"r{run}")
            if run >= 0:
                turns[name].append(turn)
    lines = [
        "| routing | turns on the vLLM of the turn before | vLLMs a group begins on | busiest vLLM to the mean | CPU ms a call |"
    ]
    lines.append("|---|---|---|---|---|")
    lines += [_row(name, kind) for name, kind in turns.items()]
    if len(turns) == 2:
        added = [now.cpu_ms - then.cpu_ms for then, now in zip(*turns.values(), strict=True)]
        ratios = [now.cpu_ms / then.cpu_ms for then, now in zip(*turns.values(), strict=True)]
        lines += ["", f"CPU added to a call: {_spread(added)} ms; ratio {_spread(ratios)} (median, least to most)."]
    turn = await rollouts(gateways[NOW], "killed", vllms[0])
    moved = f"{turn.moves} of {SCENARIOS * GROUP} rollouts changed their vLLM"
    lines += ["", f"One vLLM killed: {turn.calls} calls answered, {len(turn.failed)} failed; {moved}."]
    return lines + turn.failed[:1]


def _row(name: str, turns: list[Turn]) -> str:
    cells = [f"{statistics.median(turn.same for turn in turns):.1%}"]
    cells += [f"{statistics.median(turn.spread for turn in turns):.2f}", _spread([turn.busiest for turn in turns])]
    cells.append(_spread([turn.cpu_ms for turn in turns]))
    return f"| {name} | " + " | ".join(cells) + " |"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="a second server, from this commit")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/results/routing.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="routing-") as name:
        folder = Path(name)
        with (
            beside(options.against, folder) as checkouts,
            started(checkouts, folder, VLLMS) as (gateways, vllms),
        ):
            table = "\n".join(asyncio.run(measure(gateways, vllms, options.runs)))
    print(table)
    if options.write:
        against = f" --against {options.against}" if options.against else ""
        command = f"    python benchmarks/routing.py{against} --runs {options.runs} --write"
        text = (__doc__ or "").split("\n\n", 2)[2].strip()
        RESULTS.write_text(f"# Routing of trajectories\n\n{command}\n\n{text}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
