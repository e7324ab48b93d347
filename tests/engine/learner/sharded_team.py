"""A team with a sharded base: this process is its first learner, the others are processes that run this module."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from offbook.base.config import LoraOptions
from offbook.engine.learner.model import sharding
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.model.probes import mask_probe
from offbook.engine.learner.team import Team
from offbook.engine.learner.team_tasks import follow
from tests.engine.learner.tiny_models import exact
from tests.paths import ROOT

LORA = LoraOptions(r=2, alpha=4)


@contextmanager
def sharded_team(
    base: Path, dtype: torch.dtype, size: int = 2, *, recomputed: bool = False, seconds: float = 600.0
) -> Iterator[tuple[Team, Policy]]:
    """The team, which has joined, and the first learner's policy. `recomputed`: activations are. `seconds`: that one waits
    for another in a collective."""
    listening = sharding.listen()
    port = str(listening.getsockname()[1])
    options = ["--base", str(base), "--dtype", str(dtype).removeprefix("torch."), "--size", str(size), "--port", port]
    options += ["--seconds", str(seconds), *(["--recomputed"] if recomputed else [])]
    ends = [Pipe() for _ in range(size - 1)]
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.learner.sharded_team", *options, "--rank", str(rank)],
            stdin=theirs.fileno(),
            cwd=ROOT,
        )
        for rank, (_, theirs) in enumerate(ends, 1)
    ]
    for _, theirs in ends:
        theirs.close()
    over = threading.Event()

    def lost(rank: int) -> None:
        if not over.is_set():
            print(f"learner {rank + 1} of {size} has ended", file=sys.stderr)
            interrupt_main()

    try:
        sharding.COLLECTIVE_SECONDS = seconds
        sharding.join_group(0, size, int(port), "cpu", listening)
        policy = part_of(base, dtype, recomputed=recomputed)
        team = Team([ours for ours, _ in ends], lost, sharded=True)  # pyright: ignore[reportArgumentType]  # it ends the waiting thread
        assert team.join(policy, mask_probe).ok
        yield team, policy
    finally:
        over.set()
        for other in others:
            other.kill()
            other.wait()
        for ours, _ in ends:
            ours.close()
        dist.destroy_process_group()


def part_of(base: Path, dtype: torch.dtype, *, recomputed: bool) -> Policy:
    """This process's part of the base, with an adapter."""
    policy = Policy.load(base, LORA, dtype=dtype, sharded=True)
    if recomputed:
        cast(PreTrainedModel, policy.model.get_base_model()).gradient_checkpointing_enable({"use_reentrant": False})
        policy.reset_adapter(LORA)
    return exact(policy) if dtype == torch.float64 else policy


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("base", Path), ("dtype", str), ("size", int), ("port", int), ("rank", int), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--recomputed", action="store_true")
    arguments = parser.parse_args()

    def load() -> Policy:
        sharding.COLLECTIVE_SECONDS = arguments.seconds
        sharding.join_group(arguments.rank, arguments.size, arguments.port, "cpu")
        return part_of(arguments.base, getattr(torch, arguments.dtype), recomputed=arguments.recomputed)

    follow(Connection(os.dup(0)), load, "cpu", mask_probe)


if __name__ == "__main__":
    main()
