"""Command-line agents as rollouts: Claude Code, Codex and Gemini CLI, where they are installed. They are too large for CI."""

from __future__ import annotations

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from offbook import Command, RemoteBackend, TrainableModel
from offbook.testing import scripted_server
from tests.fakes.obedient_policy import obey

AGENTS = {
    "claude": "claude -p {prompt} --tools Bash --dangerously-skip-permissions",
    "codex": "codex exec --skip-git-repo-check --sandbox danger-full-access {prompt}",
    "gemini": "gemini -p {prompt} --yolo",
}
ORDERS = {
    "claude": 'Bash(command="echo teal", description="a") then Bash(command="echo 4821", description="b")',
    "codex": 'exec_command(cmd="echo teal") then exec_command(cmd="echo 4821")',
    "gemini": 'run_shell_command(command="echo teal") then run_shell_command(command="echo 4821")',
}


@pytest.mark.slow("command-line agents")
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_runs_two_commands_and_each_prompt_extends_the_last(agent: str, tmp_path: Path) -> None:
    if shutil.which(agent) is None:
        pytest.skip(f"not available: {agent} on PATH")
    with scripted_server(obey) as server:
        folder = tmp_path / "work"
        folder.mkdir()
        model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server.url))
        env = {
            "IS_SANDBOX": "1",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        }  # else Claude Code refuses root, Gemini the folder
        command = Command(AGENTS[agent], reward="exit", timeout=300, folder=str(folder), env=env)
        trajectory = asyncio.run(command(model, {"prompt": ORDERS[agent]}))
        assert (trajectory.reward, trajectory.exception) == (1.0, None), trajectory.logs
        assert "teal" in trajectory.logs[0] and "4821" in trajectory.logs[0]
        calls = server.calls(trajectory.id)
        assert len(calls) == len(server.sampler.received) == 3
        for before, after in pairwise(calls):
            sampled = before.prompt_ids + before.outputs[0].token_ids
            assert after.prompt_ids[: len(sampled)] == sampled
