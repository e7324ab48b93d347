"""A run with overlap beside the same run without, on the tiny policy: wall time, and how old rollouts were.

    python benchmarks/overlap.py [--steps 6] [--runs 2] [--staleness 1] [--tool-seconds 0 0.5 2] [--threads 1] [--json FILE]

One server; each run trains a fresh model from the same scenarios. Runs with and without overlap alternate. A rollout is two
calls, and between them a tool that takes `--tool-seconds`: at 0 sampling and training compete for the same cores, and little is
to be gained; the longer rollouts wait for tools, the more of an update is hidden beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import offbook
from offbook.base.types import new_id
from offbook.trainer.progress import PlainProgress

SCENARIOS = [{"id": word, "prompt": f"say the word {word}"} for word in ("blue", "teal", "pink", "grey")]


@dataclass(frozen=True)
class Measured:
    """Seconds of one run: in all, of its rollouts and of its updates. Staleness in steps."""

    overlap: bool
    tool_seconds: float
    wall: float
    rollouts: float
    training: float
    staleness_mean: float
    staleness_max: float


def agent(tool_seconds: float) -> Any:
    """Two calls with a tool between them. No two rewards are the same: every step trains."""
    rewards = itertools.count()

    async def rollout(model: offbook.TrainableModel, scenario: dict[str, str]) -> offbook.Trajectory:
        client = model.openai_client()
        found = offbook.Trajectory(messages_and_choices=[{"role": "user", "content": scenario["prompt"]}])
        for turn in range(2):
            answer = await client.chat.completions.create(model=model.name, messages=found.messages(), max_tokens=32)
            found.messages_and_choices.append(answer.choices[0])
            if turn == 0:
                await asyncio.sleep(tool_seconds)
                found.messages_and_choices.append({"role": "user", "content": "the tool says: go on"})
        found.reward = float(next(rewards))
        return found

    return rollout


def measure(backend: offbook.LocalBackend, steps: int, tool_seconds: float, staleness: int) -> Measured:
    """One run; `staleness` 0 is without overlap."""
    model = offbook.TrainableModel(new_id("overlap"), base_model="tiny", backend=backend)
    config = offbook.TrainConfig(overlap=True, max_staleness=staleness) if staleness else offbook.TrainConfig()
    progress = PlainProgress(Console(file=io.StringIO()), steps)
    trainer = offbook.Trainer(model, agent(tool_seconds), SCENARIOS, config=config, group_size=4, progress=progress)
    began = time.monotonic()
    report = trainer.train(steps)
    wall = time.monotonic() - began
    ages = [each.metrics.get("staleness/mean", 0.0) for each in report.iterations]
    return Measured(
        overlap=bool(staleness),
        tool_seconds=tool_seconds,
        wall=wall,
        rollouts=sum(each.rollout_seconds for each in report.iterations),
        training=sum(each.train_seconds for each in report.iterations),
        staleness_mean=statistics.fmean(ages),
        staleness_max=max(each.metrics.get("staleness/max", 0.0) for each in report.iterations),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--tool-seconds", type=float, nargs="+", default=[0.0, 0.5, 2.0])
    parser.add_argument("--threads", type=int, default=1, help="of each engine process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: list[Measured] = []
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; 16 rollouts a step, {options.steps} steps")
    print("| tool s | overlap | wall s | rollouts s | training s | staleness mean, max |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        backend = offbook.LocalBackend(Path(folder), threads=options.threads)
        try:
            measure(backend, 1, 0.0, 0)  # the first step loads the learner
            for tool_seconds in options.tool_seconds:
                for _, staleness in itertools.product(range(options.runs), (0, options.staleness)):
                    found = measure(backend, options.steps, tool_seconds, staleness)
                    results.append(found)
                    print(
                        f"| {found.tool_seconds:g} | {'yes' if found.overlap else 'no'} | {found.wall:.1f} | "
                        f"{found.rollouts:.1f} | {found.training:.1f} | "
                        f"{found.staleness_mean:.2f}, {found.staleness_max:.0f} |",
                        flush=True,
                    )
        finally:
            backend.close()
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
