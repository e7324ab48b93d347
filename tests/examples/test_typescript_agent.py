"""The example in TypeScript: its agent knows nothing of Offbook, its versions are the tested ones, and it trains a step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.node import NODE_CLIENTS, node_program
from tests.paths import ROOT

EXAMPLE = ROOT / "examples" / "typescript_agent"


def test_it_knows_nothing_of_offbook_and_its_packages_are_those_that_are_tested() -> None:
    assert "offbook" not in (EXAMPLE / "agent.ts").read_text("utf-8").lower()
    used, tested = (json.loads((folder / "package.json").read_text("utf-8")) for folder in (EXAMPLE, NODE_CLIENTS))
    assert used["dependencies"].items() <= tested["dependencies"].items()


@pytest.mark.slow("clients on Node")
def test_a_step_is_trained(require: Callable[[bool, str], None], tmp_path: Path) -> None:
    node = node_program(require)
    shutil.copytree(EXAMPLE, tmp_path / EXAMPLE.name, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copy(ROOT / "examples" / "measured_training.py", tmp_path)
    (tmp_path / EXAMPLE.name / "node_modules").symlink_to(NODE_CLIENTS / "node_modules")
    path = os.pathsep.join([str(node.parent), os.environ["PATH"]])
    words = [sys.executable, "-m", "typescript_agent.train", "--steps", "1", "--dir", str(tmp_path / "games")]
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "after: step 1," in done.stdout
    assert list(tmp_path.glob("games/examples/models/*/checkpoints/0001/adapter_model.safetensors"))
