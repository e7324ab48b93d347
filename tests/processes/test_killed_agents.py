"""An agent on Node and Claude Code, killed in each phase of a rollout, or their trainer: no process is left, nothing is half scored."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from offbook.base.types import Call, CallStatus, new_id
from offbook.testing import Action, PolicySampler, ScriptedServer, scripted_server
from offbook.testing.asgi import Body
from tests.fakes.node import NODE_CLIENTS, node_program
from tests.fakes.obedient_policy import obey
from tests.server.servers import until

from .test_clis import AGENTS
from .test_program import becomes, marked

SECONDS = 120.0
"""Generous, for machines that are shared."""
PIECES = {"first call": 1, "mid-stream": 40}
"""Phase -> pieces of the first answer's stream that are sent before it stands still."""
PHASES = ("starting", *PIECES, "between calls", "at exit")
ORDERS = {
    "node": ("add(a=1, b=2) then add(a=3, b=4)", "add(a=-600, b=2)"),
    "claude": (
        'Bash(command="echo teal", description="a") then Bash(command="echo 4821", description="b")',
        'Bash(command="tail -f /dev/null", description="a")',
    ),
}
"""Agent -> two calls of a tool, and one that takes long, for the phase between calls."""
MARKS = {"node": pytest.mark.slow("clients on Node"), "claude": pytest.mark.slow("command-line agents")}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def policy(body: Body) -> Action:
    """Obeys. Its first turn says a hundred words before the call."""
    action = obey(body)
    first = not any(message["role"] == "tool" for message in body["messages"])
    return replace(action, text="word " * 100) if first and action.calls else action


class Pauses:
    """After each piece of a stream: none, until `standing_after` pieces were sent."""

    sent, standing_after = 0, sys.maxsize

    def next(self, _: PolicySampler) -> float:
        self.sent += 1
        return 2.0 if self.sent >= self.standing_after else 0.0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    made = Pauses()
    monkeypatch.setattr(PolicySampler, "piece_seconds", property(made.next, lambda *_: None), raising=False)
    return made


@pytest.fixture
def server(pauses: Pauses) -> Iterator[ScriptedServer]:
    with scripted_server(policy) as running:
        yield running
        pauses.standing_after = sys.maxsize


@pytest.fixture
def words(
    request: pytest.FixtureRequest, require: Callable[[bool, str], None], command_line_agent: Callable[[str], str]
) -> list[str]:
    """The command of the agent that the test names."""
    if request.getfixturevalue("agent") == "node":
        script = str(NODE_CLIENTS / "agents.mjs")
        return [str(node_program(require)), script, "@ai-sdk/anthropic", "streamed", "{prompt}"]
    return [command_line_agent("claude"), *shlex.split(AGENTS["claude"])[1:]]


@dataclass
class Evaluation:
    """`offbook eval` of one rollout, in a process of its own."""

    words: list[str]
    order: str
    server: ScriptedServer
    folder: Path
    run: str
    rollout: str = "none"

    def start(self) -> subprocess.Popen[bytes]:
        scenarios = self.folder / "scenarios.jsonl"
        scenarios.write_text(json.dumps({"prompt": self.order}) + "\n")
        options = ["--scenarios", str(scenarios), "--command", shlex.join(self.words), "--reward", "exit"]
        options += ["--run", self.run, "--model", "agent", "--base-model", "tiny"]
        own = {"OFFBOOK_URL": self.server.url, "OFFBOOK_TEST_MARK": str(self.folder), "IS_SANDBOX": "1"}
        # Claude Code's shell reads the profile below HOME: killed there, it would leave the locks of the user's tools behind.
        own["HOME"] = str(self.folder)
        with (self.folder / "log").open("ab") as log:
            argv = [sys.executable, "-m", "offbook", "eval", *options]
            return subprocess.Popen(argv, env=os.environ | own, stdout=log, stderr=log, cwd=self.folder)

    def programs(self) -> list[int]:
        """The program and what it started, oldest first. Notes the rollout that it belongs to."""
        found: list[int] = []
        for pid in sorted(marked(str(self.folder))):
            _, equals, value = read(pid, "environ").partition(b"\0OFFBOOK_TRAJECTORY=")
            if equals and b"supervisor.py" not in read(pid, "cmdline"):
                self.rollout = value.partition(b"\0")[0].decode()
                found.append(pid)
        return found

    def calls_tool(self, agent: str) -> bool:
        """Whether the slow tool runs: Claude Code's in a process, the one on Node within the program."""
        return agent == "node" or any(read(pid, "cmdline").startswith(b"tail\0") for pid in self.programs())

    def complete(self) -> list[Call]:
        return [call for call in self.server.calls(self.rollout) if call.status is CallStatus.COMPLETE]

    def scored(self) -> list[dict[str, Any]]:
        listed = self.server.http.get("/api/trajectories", params={"run": self.run}).raise_for_status().json()
        return [each for each in listed["trajectories"] if each["reward"] is not None]


def read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


def kills() -> Iterator[Any]:
    """Agent, phase and victim. The trainer of the agent on Node is killed in one phase, Claude Code's in each."""
    for agent, phase, victim in product(MARKS, PHASES, ("program", "trainer")):
        if (agent, victim) != ("node", "trainer") or phase == "mid-stream":
            yield pytest.param(agent, phase, victim, marks=MARKS[agent])


@pytest.mark.parametrize(("agent", "phase", "victim"), kills())
def test_a_kill_in_any_phase_leaves_no_process_and_no_half_scored_rollout(
    agent: str, phase: str, victim: str, words: list[str], server: ScriptedServer, pauses: Pauses, tmp_path: Path
) -> None:
    pauses.standing_after = PIECES.get(phase, sys.maxsize)
    order = ORDERS[agent][phase == "between calls"]
    evaluation = Evaluation(words, order, server, tmp_path, new_id("run"))
    reached: dict[str, Callable[[], bool]] = {
        "starting": lambda: True,
        "between calls": lambda: len(evaluation.complete()) == 1 and evaluation.calls_tool(agent),
        "at exit": lambda: len(evaluation.complete()) == 3,
    }
    here = reached.get(phase, lambda: pauses.sent >= pauses.standing_after)
    trainer = evaluation.start()
    try:
        until(lambda: (evaluation.programs() and here()) or trainer.poll() is not None, phase, SECONDS)
        assert trainer.poll() is None or phase == "at exit", (tmp_path / "log").read_text()[-2_000:]
        if victim == "trainer":
            trainer.kill()
        elif programs := evaluation.programs():
            os.kill(programs[0], signal.SIGKILL)
        pauses.standing_after = sys.maxsize
        trainer.wait(SECONDS)
    finally:
        trainer.kill()
        trainer.wait()
    assert becomes(lambda: not marked(str(tmp_path)), SECONDS), marked(str(tmp_path))
    if phase != "at exit":  # there, the program or the rollout may have ended before the signal
        assert evaluation.scored() == []
    for rollout in evaluation.scored():
        assert (rollout["id"], rollout["reward"], len(evaluation.complete())) == (evaluation.rollout, 1.0, 3)

    again = replace(evaluation, order=ORDERS[agent][0], run=new_id("run"))
    assert again.start().wait(SECONDS) == 0, (tmp_path / "log").read_text()[-2_000:]
    [rollout] = again.scored()
    assert (rollout["reward"], len(server.calls(rollout["id"]))) == (1.0, 3)
