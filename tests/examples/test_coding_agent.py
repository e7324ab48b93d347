"""The coding example: its repositories, its agent over a scripted policy, and a step of `train.py --tiny`."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from offbook import Command, RemoteBackend, TrainableModel, Trajectory
from offbook.testing import ScriptedServer, scripted_server
from tests.examples.trainings import train_a_step
from tests.fakes.obedient_policy import obey
from tests.paths import ROOT, script

EXAMPLE = ROOT / "examples" / "coding_agent"


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    """The module of the example, which is a folder of scripts."""
    return script(EXAMPLE / "tasks.py")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server(obey) as running:
        yield running


def test_each_bug_fails_its_tests_and_its_repair_passes_them(tasks: ModuleType) -> None:
    for bug in tasks.BUGS:
        body = tasks.test_code(bug).partition("\n")[2]
        exec(bug.source.format(bug.right) + body, {})
        with pytest.raises((AssertionError, IndexError)):
            exec(bug.source.format(bug.wrong) + body, {})


def rolled(server: ScriptedServer, repositories: Path, prompt: str) -> Trajectory:
    """A rollout of the agent in a copy of the first repository, graded as `train.py` does."""
    agent = Command(
        [sys.executable, "-S", str(EXAMPLE / "agent.py"), "{prompt}"],
        folder=str(repositories / "{repo}"),
        grader=shlex.join([sys.executable, str(EXAMPLE / "grade.py")]) + " {module}",
        timeout=60,
    )
    model = TrainableModel("coder", base_model="tiny", backend=RemoteBackend(server.url))
    return asyncio.run(agent(model, {"prompt": prompt, "repo": "clamp-0", "module": "clamp"}))


def test_the_agent_mends_a_copy_and_the_tests_outside_it_judge(
    server: ScriptedServer, tasks: ModuleType, tmp_path: Path
) -> None:
    assert "offbook" not in (EXAMPLE / "agent.py").read_text().lower()
    tasks.write(tmp_path, tiny=False)
    [first, *_] = map(json.loads, (tmp_path / "train.jsonl").read_text().splitlines())
    assert (first["repo"], first["module"]) == ("clamp-0", "clamp")
    repair = "sed -i 's/max(min(x, low), high)/max(min(x, high), low)/' clamp.py"
    mended = rolled(server, tmp_path / "repos", f'run_tests(module="clamp") then bash(command="{repair}")')
    assert (mended.reward, mended.exception) == (1.0, None)
    assert [message["role"] for message in mended.messages()][1:] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert "AssertionError: clamp(-1, 0, 3) == 0" in str(mended.messages()[3].get("content"))
    cheat = "true > test_clamp.py; echo 'def clamp(*_): return 3' > clamp.py"
    cheated = rolled(server, tmp_path / "repos", f'bash(command="{cheat}") then run_tests(module="clamp")')
    assert (cheated.reward, cheated.exception) == (0.0, None)
    assert cheated.messages()[5].get("content") == "passed\n"
    source = (tmp_path / "repos" / "clamp-0" / "clamp.py").read_text()
    assert source == tasks.BUGS[0].source.format(tasks.BUGS[0].wrong), "the rollouts ran in copies"


@pytest.mark.slow("whole trainings")
def test_a_step_of_the_tiny_form(tmp_path: Path) -> None:
    assert train_a_step([str(EXAMPLE / "train.py")], tmp_path, "--tiny") == {"coder-0"}
