"""A step of several examples, one after another in one process: their models are on one server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
MEASURED = ("--held-out", "4")
"""Options of an example whose training is measured: on few scenarios."""
_RUN = """
import runpy, sys
import offbook

whole = offbook.Trainer.__init__
def small(self, *words, **options):
    whole(self, *words, **options | {"group_size": 4, "scenarios_per_step": 2})
offbook.Trainer.__init__ = small
config = offbook.SFTConfig
offbook.SFTConfig = lambda **options: config(**options | {"epochs": 1})
modules, words = sys.argv[1].split(), sys.argv[2:]
for module in modules:
    print(f"==== {module}", flush=True)
    sys.argv = [module, *words]
    if module.endswith(".py"):
        sys.path.insert(0, module.rpartition("/")[0])
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def train_a_step(
    modules: Sequence[str],
    folder: Path,
    *options: str,
    examples: Path = EXAMPLES,
    environment: Mapping[str, str] | None = None,
) -> set[str]:
    """Run these modules or scripts of `examples` as Python does, with `--steps 1` of 8 rollouts and one epoch of examples.
    Returns the models in `folder` with a step."""
    place = [] if "--url" in options else ["--dir", str(folder)]  # a server elsewhere has its own
    words = ["--steps", "1", *place, *options]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, " ".join(modules), *words],
        cwd=examples,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return {path.parents[2].name for path in folder.rglob("checkpoints/0001/adapter_model.safetensors")}
