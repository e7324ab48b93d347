"""What the pages show runs: their Python, top to bottom, as a reader would type it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import offbook
from tests.paths import ROOT


def code_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
async def server(local_backend: offbook.LocalBackend) -> dict[str, str]:
    """The shared server, as the environment names it. A page without it starts one of its own, as its reader does."""
    api = await local_backend.connect("tiny")
    return {"OFFBOOK_URL": api.url, "OFFBOOK_API_KEY": api.key or ""}


def run(code: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a script prints, run in a process and a folder of its own."""
    script = folder / "page.py"
    script.write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **(environment or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow("whole trainings")
def test_an_app_is_wrapped_as_the_pages_tell_and_every_call_is_captured(tmp_path: Path, server: dict[str, str]) -> None:
    printed = run("\n".join(code_of("langgraph.md") + code_of("captured.md")), tmp_path, server)
    told = re.search(r"^(\d\.\d\d) -> (\d\.\d\d) at step (\d); the LoRA is in .*/000\3$", printed, re.MULTILINE)
    assert told is not None, printed
    assert float(told[2]) >= float(told[1])
    observed = printed.strip().splitlines()[-1]
    assert "where is box 4821?" in observed and "On shelf 7." in observed


@pytest.mark.slow("whole trainings")
def test_the_block_of_the_readme_learns_and_its_logprobs_can_be_recomputed(tmp_path: Path) -> None:
    block = code_of("../README.md")[0]
    assert len(block.splitlines()) <= 30
    printed = run(block, tmp_path)
    before, after = (float(number) for number in re.findall(r"^(?:before|after): +(\d\.\d+)$", printed, re.MULTILINE))
    assert before == 0.5 and after > 0.8, printed
    again = run("\n".join(code_of("reading_steps.md")), tmp_path)
    worst = re.search(r"differ by at most (\d\.\de-\d\d) nats$", again, re.MULTILINE)
    assert worst is not None and float(worst[1]) < 1e-3, again


@pytest.mark.slow("whole trainings")
def test_a_run_of_the_trainer_goes_as_the_page_shows(tmp_path: Path, server: dict[str, str]) -> None:
    last = run("\n".join(code_of("training.md")), tmp_path, server).splitlines()[-1]
    assert re.search(r"^(finished|solved) (\d) .*/000\2$", last) is not None, last


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_step_by_hand_has_the_coefficients_of_the_page(tmp_path: Path) -> None:
    assert run("\n".join(code_of("learner.md")), tmp_path) == "3 -0.1667\n4 -0.1667\n6 -0.1667\n7 0.5000\n"


@pytest.mark.slow("whole trainings")
def test_an_agent_of_another_library_is_trained_as_the_page_tells(tmp_path: Path, server: dict[str, str]) -> None:
    assert run("\n".join(code_of("frameworks.md")), tmp_path, server).splitlines()[-1] == "1 0.0"


@pytest.mark.slow("whole trainings")
def test_a_program_is_a_rollout_as_the_page_tells(tmp_path: Path, server: dict[str, str]) -> None:
    assert run("\n".join(code_of("programs.md")), tmp_path, server).splitlines()[-1] == "4"


@pytest.mark.parametrize("page", ["langfuse.md", "wandb.md", "production_scenarios.md"])
def test_the_pages_about_trace_sinks_run_as_they_are_shown(page: str, tmp_path: Path) -> None:
    printed = run("\n".join(code_of(page)), tmp_path)
    assert page != "wandb.md" or printed.startswith("kl kl/sampler_learner is 0.03, above 0.02: ")


@pytest.mark.slow("whole trainings")
def test_the_page_about_testing_runs_as_it_is_shown(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    blocks = code_of("testing.md")
    shown = set(re.findall(r"^(?:async )?def (test_\w+)", "\n".join(blocks), re.MULTILINE))
    assert shown == set(re.findall(r"^(?:    |asyncio\.run\()?(test_\w+)\(", page, re.MULTILINE))  # each is called
    assert run("\n".join(blocks), tmp_path) == ""
