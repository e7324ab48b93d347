"""A server as people write their first one, of four tools without annotations, is trained on from one command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offbook_mcp.scenarios.scenario import load_scenarios
from tests.paths import ROOT

TOOLS = ("people", "department", "desk", "headcount")
SMALL = ["--count", "16", "--steps", "1", "--group-size", "4", "--scenarios-per-step", "2", "--max-turns", "3"]


@pytest.mark.slow("whole trainings")
def test_a_plain_server_is_trained_on_from_one_command_with_one_flag(tmp_path: Path) -> None:
    (tmp_path / "plain_server.py").write_text((ROOT / "tests/mcp_adapter/servers/plain_server.py").read_text())
    allowed = [word for tool in TOOLS for word in ("--allow", tool)]
    paths = [str(ROOT / "src"), str(ROOT / "integrations")]
    done = subprocess.run(
        [sys.executable, "-m", "offbook", "mcp", "train", "plain_server:server", *allowed, *SMALL],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = load_scenarios(tmp_path / ".offbook/mcp/staff.jsonl")
    assert {tool for scenario in made.scenarios for tool in scenario.tools} == set(TOOLS)
    assert (len(made.train), len(made.eval)) == (12, 4)
    assert re.search(r"^all +\d+% +\d+%$", done.stdout, re.MULTILINE)
    for shown in ("step 1/1", "success on 4 held-out scenarios (greedy)", "LoRA    ", "staff is at step 1."):
        assert shown in done.stdout
    assert (tmp_path / ".offbook/mcp/models/staff/checkpoints/0001").is_dir()
