"""A step of several examples, one after another in one process: their models are on one server, which may be the tests' own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import offbook
from offbook.client.connection.http import Api

EXAMPLES = Path(__file__).parents[2] / "examples"
MEASURED = ("--held-out", "4")
"""Options of an example whose training is measured: on few scenarios."""
_RUN = """
import os, runpy, sys
import offbook

if url := os.environ.get("OFFBOOK_URL"):
    offbook.LocalBackend = lambda *_, **__: offbook.RemoteBackend(url)

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


def api_of(backend: offbook.LocalBackend) -> Api:
    """The tests' own server, running."""
    return asyncio.run(backend.connect("tiny"))


def trained_in(*folders: Path) -> set[str]:
    """The models in `folders` that have a step."""
    steps = (path for folder in folders for path in folder.rglob("checkpoints/0001/adapter_model.safetensors"))
    return {path.parents[2].name for path in steps}


def train_a_step(
    modules: Sequence[str],
    folder: Path,
    *options: str,
    examples: Path = EXAMPLES,
    environment: Mapping[str, str] | None = None,
    backend: offbook.LocalBackend | None = None,
) -> set[str]:
    """Run these modules or scripts of `examples` as Python does, with `--steps 1` of 8 rollouts and one epoch of examples.
    `backend`: train there, instead of on a server that the first example starts. Returns the models that have a step now."""
    place = [] if "--url" in options else ["--dir", str(folder)]  # a server elsewhere has its own
    words = ["--steps", "1", *place, *options]
    folders, before, variables = [folder], set[str](), dict(environment or {})
    if backend is not None:
        api = api_of(backend)
        variables |= {"OFFBOOK_URL": api.url, "OFFBOOK_API_KEY": api.key or ""}
        folders, before = [folder, backend.dir], trained_in(backend.dir)
    done = subprocess.run(
        [sys.executable, "-c", _RUN, " ".join(modules), *words],
        cwd=examples,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return trained_in(*folders) - before
