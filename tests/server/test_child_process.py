"""How the threads of an engine wait: short by default, and as the user says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offbook.server.child_process import SPIN_COUNT, Child

PRINT = "import os; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, f"{SPIN_COUNT} None"),
        ({"GOMP_SPINCOUNT": "7"}, "7 None"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "None PASSIVE"),
    ],
    ids=["nothing is set", "a count is set", "a policy is set"],
)
async def test_threads_wait_short_unless_the_environment_says_how(
    given: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    child = await Child.start([sys.executable, "-c", PRINT], tmp_path / "log")
    await child.exited.wait()
    assert (tmp_path / "log").read_text() == f"{expected}\n"
