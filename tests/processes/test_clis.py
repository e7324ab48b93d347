"""Command-line agents as rollouts: Claude Code, Codex and Gemini CLI. They are too large for CI."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from offbook import Command, LocalBackend, RemoteBackend, TrainableModel, TrainConfig, Trainer, Trajectory
from offbook.base.types import new_id
from offbook.testing import scripted_server
from tests.client.results import Result, check, mode_of
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


NAMES = {"claude": ("Claude Code", "Messages"), "codex": ("Codex", "Responses"), "gemini": ("Gemini CLI", "Gemini")}
"""Program -> its name and API in the table of clients."""


def version_of(agent: str) -> str:
    """The version that a program prints."""
    printed = subprocess.run([agent, "--version"], capture_output=True, text=True, timeout=120, check=True).stdout
    return re.findall(r"\d+\.\d+\.\d+", printed)[0]


@pytest.mark.slow("command-line agents")
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_runs_two_commands_and_each_prompt_extends_the_last(
    agent: str, command_line_agent: Callable[[str], str], tmp_path: Path
) -> None:
    words = [command_line_agent(agent), *shlex.split(AGENTS[agent])[1:]]
    with scripted_server(obey) as server:
        folder = tmp_path / "work"
        folder.mkdir()
        model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server.url))
        env = {
            "IS_SANDBOX": "1",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        }  # else Claude Code refuses root, Gemini the folder
        command = Command(words, reward="exit", timeout=300, folder=str(folder), env=env)
        trajectory = asyncio.run(command(model, {"prompt": ORDERS[agent]}))
        assert (trajectory.reward, trajectory.exception) == (1.0, None), trajectory.logs
        assert "teal" in trajectory.logs[0] and "4821" in trajectory.logs[0]
        calls = server.calls(trajectory.id)
        assert len(calls) == len(server.sampler.received) == 3
        for before, after in pairwise(calls):
            sampled = before.prompt_ids + before.outputs[0].token_ids
            assert after.prompt_ids[: len(sampled)] == sampled
        received, (name, api) = server.sampler.received, NAMES[agent]
        modes = (mode_of(received),)
        check(Result("command line", name, version_of(words[0]), api, len(received), len(calls), True, modes))


@pytest.mark.slow("command-line agents")
def test_claude_code_trains_a_step(
    local_backend: LocalBackend, command_line_agent: Callable[[str], str], tmp_path: Path
) -> None:
    model = TrainableModel(new_id("claude"), base_model="tiny", backend=local_backend)
    words = [command_line_agent("claude"), "-p", "{prompt}", "--tools", "Bash", "--system-prompt", "You answer."]
    command = Command(words, reward="none", timeout=300, folder=str(tmp_path), env={"IS_SANDBOX": "1"})

    def length(scenario: object, trajectory: Trajectory) -> float:
        return float(sum(len(str(message.get("content"))) for message in trajectory.messages()))

    scenarios = [{"prompt": "where is box 4821?"}]
    config = TrainConfig(learning_rate=1e-3)
    trainer = Trainer(model, command, scenarios, group_size=4, scenarios_per_step=1, reward=length, config=config)
    report = trainer.train(1)
    assert (report.step, report.iterations[0].trained) == (1, True)
