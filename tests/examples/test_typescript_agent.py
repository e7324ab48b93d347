"""The example in TypeScript: its agent knows nothing of Offbook, its versions are the tested ones, and it trains a step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.trainings import MEASURED, train_a_step
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
    trained = train_a_step(
        ["typescript_agent.train"], tmp_path / "games", *MEASURED, examples=tmp_path, environment={"PATH": path}
    )
    assert trained == {"night-desk-0"}
