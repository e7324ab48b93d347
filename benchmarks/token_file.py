"""Size and cost of the token file of a step: bytes a token, and processor seconds beside those of the step itself.

    python benchmarks/token_file.py [--json FILE]

One step of the bundled policy on the CPU, with one update and with several. `make_token_file` builds the arrays,
`store_token_file` writes them with fsync. The step is the learner's own, from reading the job to the renamed checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from offbook import tiny
from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.types import Sampling
from offbook.engine import token_file
from offbook.engine.learner import learner as learner_module
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.protocol import JobTrajectory, Sample, TrainCommand, TrainJob, write_job

ROUNDS = 3


def rollouts(
    groups: int, size: int, turns: int, prompt: int, answer: int, tool: int
) -> tuple[tuple[JobTrajectory, ...], ...]:
    """Groups of rollouts of several turns over random tokens."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(64, 1000) for _ in range(count)]

    made: list[tuple[JobTrajectory, ...]] = []
    for g in range(groups):
        opening, members = tokens(prompt), list[JobTrajectory]()
        for i in range(size):
            context, samples = list(opening), list[Sample]()
            for turn in range(turns):
                sampled = tokens(answer)
                samples.append(
                    Sample(
                        f"call-{g:08x}{i:08x}{turn:08x}{0:08x}",  # as long as a real id
                        0,
                        np.array(context, np.int32),
                        np.array(sampled, np.int32),
                        np.full(answer, -6.0, np.float32),
                        Sampling(),
                        0,
                    )
                )
                context += sampled + tokens(tool)
            members.append(JobTrajectory(f"traj-{g:016x}{i:016x}", float(i % 2), tuple(samples)))
        made.append(tuple(members))
    return tuple(made)


class Timed:
    """Processor seconds that the learner spends in a function of its own."""

    def __init__(self, name: str) -> None:
        self.seconds: list[float] = []
        inner = getattr(learner_module, name)

        def timed(*arguments: object) -> object:
            started = time.process_time()
            try:
                return inner(*arguments)
            finally:
                self.seconds.append(time.process_time() - started)

        setattr(learner_module, name, timed)


def measure(
    learner: Learner, root: Path, config: TrainConfig, made: Timed, stored: Timed, **shape: int
) -> dict[str, float]:
    """Medians over ROUNDS steps of one shape."""
    whole: list[float] = []
    made.seconds.clear()
    stored.seconds.clear()
    groups = rollouts(**shape)
    for step in range(ROUNDS):
        request = f"request-{step}"
        write_job(root / "jobs" / request, TrainJob(request, "agent", groups, config))
        started = time.process_time()
        learner.train(
            TrainCommand(
                request_id=request,
                model="agent",
                job=root / "jobs" / request,
                checkpoints=root / "agent" / "checkpoints",
                step=step,
                lora=LoraOptions(),
                keep_tokens=10,
            )
        )
        whole.append(time.process_time() - started)
    path = token_file.files(root / "agent" / "tokens")[0]
    tokens = len(token_file.read(path).token_ids)
    seconds = statistics.median(a + b for a, b in zip(made.seconds, stored.seconds, strict=True))
    return {
        "calls": shape["groups"] * shape["size"] * shape["turns"],
        "tokens": tokens,
        "bytes": path.stat().st_size,
        "bytes_a_token": path.stat().st_size / tokens,
        "step_seconds": statistics.median(whole),
        "file_seconds": seconds,
        "share": seconds / statistics.median(whole),
    }


CASES = {
    "tool calls, one update": (TrainConfig(), {"turns": 3, "prompt": 200, "answer": 30, "tool": 40}),
    "long answers, one update": (TrainConfig(), {"turns": 1, "prompt": 200, "answer": 200, "tool": 0}),
    "long answers, 4 updates": (
        TrainConfig(epochs=2, minibatches=2),
        {"turns": 1, "prompt": 200, "answer": 200, "tool": 0},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    made, stored = Timed("make_token_file"), Timed("store_token_file")
    learner = Learner(Policy.load(tiny.path(), LoraOptions(), threads=1), "tiny", lambda _: None)
    results: dict[str, dict[str, float]] = {}
    print(
        "| step | calls | trained tokens | bytes | bytes a token | step, CPU s | file, CPU s | share |\n|---|---|---|---|---|---|---|---|"
    )
    for name, (config, shape) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = results[name] = measure(learner, Path(folder), config, made, stored, groups=4, size=4, **shape)
        print(
            f"| {name} | {found['calls']:.0f} | {found['tokens']:.0f} | {found['bytes']:.0f} | {found['bytes_a_token']:.1f} "
            f"| {found['step_seconds']:.2f} | {found['file_seconds']:.4f} | {found['share']:.2%} |",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
