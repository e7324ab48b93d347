"""Unsloth patches transformers only when it is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_learners_process_starts_without_transformers_so_that_unsloth_comes_first() -> None:
    code = "import sys, offbook.engine.learner.__main__; print({'transformers', 'peft'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
