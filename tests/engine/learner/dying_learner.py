"""Kills real processes at every stage of a step: python -m tests.engine.learner.dying_learner BASE ROOT. Prints one JSON line per stage.

The base is loaded once; each attempt is a fork that trains step 2 of a model at step 1 and gets a SIGKILL at its n-th
progress event, sync or rename. A second fork then sends the same request again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbook.base.config import TrainConfig
from offbook.engine.learner import checkpoints
from offbook.engine.learner.learner import Learner
from offbook.engine.learner.model.policy import Policy
from offbook.engine.protocol import Progressed, Warned
from tests.engine.learner.jobs import LORA, command, random_groups

CONFIG = TrainConfig(learning_rate=1e-2, loss="gspo", kl_coef=0.05, epochs=2, minibatches=2)


def in_fork(work: Callable[[], None]) -> int:
    """The wait status of a process that did the work."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def train(policy: Policy, root: Path, step: int, reached: Callable[[str], None]) -> None:
    def emit(event: Progressed | Warned) -> None:
        if isinstance(event, Progressed):
            reached(f"{event.phase} {event.done}/{event.total}")

    Learner(policy, "toy", emit).train(command(root, random_groups(step), step, CONFIG))


def watch_files(reached: Callable[[str], None]) -> None:
    """Report before and after every rename, and after every sync, of this process."""
    rename, fsync = os.rename, os.fsync

    def reported_rename(*names: Any) -> None:
        reached("before rename")
        rename(*names)
        reached("after rename")

    def reported_fsync(handle: int) -> None:
        fsync(handle)
        reached("after sync")

    os.rename, os.fsync = reported_rename, reported_fsync


def bits(folder: Path) -> str:
    names = ("adapter_model.safetensors", "optimizer.safetensors", "optimizer.json", "rng.safetensors")
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()


def main() -> None:
    base, root = Path(sys.argv[1]), Path(sys.argv[2])
    policy = Policy.load(base, LORA, threads=1, deterministic=True)
    assert in_fork(lambda: train(policy, root / "one", 0, lambda _: None)) == 0
    shutil.copytree(root / "one", root / "two")
    assert in_fork(lambda: train(policy, root / "two", 1, lambda _: None)) == 0
    print(json.dumps({"undisturbed": bits(root / "two/agent/checkpoints/0002")}), flush=True)
    place = 0
    while True:
        here = root / f"at-{place}"
        shutil.copytree(root / "one", here)
        stages: list[str] = []

        def reached(stage: str, stages: list[str] = stages, here: Path = here, last: int = place) -> None:
            stages.append(stage)
            if len(stages) > last:
                (here / "stage").write_text(stage)
                os.kill(os.getpid(), signal.SIGKILL)

        def dying(here: Path = here, reached: Callable[[str], None] = reached) -> None:
            watch_files(reached)
            train(policy, here, 1, reached)

        status = in_fork(dying)
        if status == 0:
            return  # every stage had its turn
        folder = here / "agent/checkpoints"
        newest = checkpoints.newest(folder, lambda message: sys.exit(message))
        again = in_fork(lambda here=here: train(policy, here, 1, lambda _: None))
        line = {
            "stage": (here / "stage").read_text(),
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "step": newest.note.step if newest is not None else 0,
            "again": again,
            "bits": bits(folder / "0002"),
            "left": sorted(child.name for child in folder.iterdir()),
        }
        print(json.dumps(line), flush=True)
        place += 1


if __name__ == "__main__":
    main()
