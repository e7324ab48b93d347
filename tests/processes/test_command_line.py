"""`offbook wrap`, and `offbook train --command`, as a user runs them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbook import Command, LocalBackend, RemoteBackend, TrainableModel, TrainConfig, Trainer
from offbook.base.types import new_id
from offbook.client.connection.http import Api
from offbook.client.rollouts.capture import recorded_calls
from offbook.commands.main import run
from offbook.testing import Action, ScriptedServer, scripted_server

from .test_command import AGENT
from .test_program import becomes, marked

NODE = """
const body = { model: process.env.OFFBOOK_MODEL, messages: [{ role: "user", content: process.argv[1] }] };
const headers = { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` };
const url = `${process.env.OPENAI_BASE_URL}/chat/completions`;
fetch(url, { method: "POST", headers, body: JSON.stringify(body) })
  .then((answer) => answer.json())
  .then((answer) => console.log("reward:", answer.choices[0].message.content.length));
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server(lambda body: Action("answer")) as running:
        asyncio.run(TrainableModel("agent", base_model="tiny", backend=RemoteBackend(running.url)).register())
        yield running


def wrap(server: ScriptedServer, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "offbook", "wrap", "--url", server.url, *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120, check=False, input="typed")


def recorded(server: ScriptedServer, said: str) -> int:
    """The number of calls that the trajectory named in the last lines has on the server."""
    return len(server.calls(said.split("in trajectory ")[1].split()[0]))


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_wrap_runs_a_program_with_its_own_streams_and_says_what_was_recorded(
    server: ScriptedServer, tmp_path: Path
) -> None:
    code = AGENT + "print(call(sys.argv[2]), sys.stdin.read()); call('again'); sys.exit(3)"
    done = wrap(server, "--", sys.executable, "-S", "-c", code, "-p", "find it", folder=tmp_path)
    assert (done.returncode, done.stdout) == (3, "answer typed\n"), done.stderr
    assert "offbook: exit code 3; recorded 2 calls of agent in trajectory traj" in done.stderr
    assert recorded(server, done.stderr) == 2


@pytest.mark.slow("a second start of the command line")
def test_wrap_holds_secrets_back_and_passes_those_that_it_is_told_to(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://shop:hunter2@db/shop")
    monkeypatch.setenv("GITHUB_PAT", "ghp_0123456789abcdefghij")
    show = (
        sys.executable,
        "-S",
        "-c",
        "import os; print(*map(os.environ.get, ('DATABASE_URL', 'GITHUB_PAT', 'MODE')))",
    )
    done = wrap(server, "--env", "GITHUB_PAT", "--env", "MODE=a=b", "--", *show, folder=tmp_path)
    assert done.stdout == "None ghp_0123456789abcdefghij a=b\n"
    [line] = [line for line in done.stderr.splitlines() if "look like secrets" in line]
    assert "DATABASE_URL" in line and "--env" in line and "GITHUB_PAT" not in line and "hunter2" not in done.stderr
    unset = wrap(server, "--env", "NO_SUCH", "--", "true", folder=tmp_path)
    assert unset.returncode == 2 and "--env: 'NO_SUCH' is not set here" in unset.stderr


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_wrap_says_where_calls_must_go_when_none_came_and_stops_a_program(
    server: ScriptedServer, tmp_path: Path
) -> None:
    done = wrap(server, "--timeout", "0.5", "--", "sleep", "600", folder=tmp_path)
    assert done.returncode == 124
    assert "stopped after 0.5 s; recorded 0 calls" in done.stderr
    assert "must send its calls to http" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow("kills of real servers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_wrap_that_is_ended_ends_its_program(server: ScriptedServer, tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-m", "offbook", "wrap", "--url", server.url, "--", "sleep", "600"]
    mark = str(tmp_path)
    running = subprocess.Popen(
        argv,
        env=os.environ | {"OFFBOOK_TEST_MARK": mark},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )
    assert becomes(lambda: len(marked(mark)) == 3, 60)
    running.send_signal(number)
    running.wait(60)
    assert becomes(lambda: not marked(mark))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--scenarios", "s.jsonl"], "nothing to run: name MODULE:NAME, or a program with --command"),
        (["train", "app:x", "--command", "y", "--scenarios", "s.jsonl"], "two things to run"),
        (["train", "app:x", "--stdin", "y", "--scenarios", "s.jsonl"], "--stdin: only valid with --command"),
        (["eval", "app:x", "--in", "docker", "--scenarios", "s.jsonl"], "--in: only valid with --command"),
        (["train", "--command", "say 'it", "--scenarios", "s.jsonl"], "cannot be split"),
        (["train", "--command", "true", "--scenarios", "s.jsonl"], "model: name the model"),
        (["wrap", "--timeout", "0", "--", "true"], "--timeout: seconds above 0"),
        (["wrap", "--", "true"], "no server is running here"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.jsonl").write_text('{"prompt": "hi"}\n')
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert said in capsys.readouterr().err


def test_a_program_of_node_is_a_rollout(server: ScriptedServer, require: Callable[[bool, str], None]) -> None:
    require(shutil.which("node") is not None, "install Node 20 or later")
    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server.url))
    command = Command(["node", "-e", NODE, "--", "{prompt}"], reward="line", timeout=60)
    trajectory = asyncio.run(command(model, {"prompt": "-p 'x'"}))
    assert (trajectory.reward, trajectory.exception) == (6.0, None)
    assert trajectory.messages()[0].get("content") == "-p 'x'"


@pytest.mark.slow("whole trainings")
def test_programs_train_a_step_through_the_trainer_and_the_command_line(
    local_backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT + "text = call(sys.argv[1], temperature=2); reward(len(text) + os.getpid())")
    model = TrainableModel(new_id("program"), base_model="tiny", backend=local_backend)
    scenarios = [
        {"id": str(number), "prompt": f"how much are {word} boxes?"} for number, word in enumerate(("two", "six"))
    ]
    command = Command([sys.executable, str(agent), "{prompt}"])
    options = {"group_size": 4, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=1e-3)}
    report = Trainer(model, command, scenarios, **options).train(1)
    assert report.step == 1
    assert report.iterations[0].trained

    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, scenarios)))
    monkeypatch.chdir(tmp_path)
    api: Api = asyncio.run(model.api())
    monkeypatch.setenv("OFFBOOK_URL", api.url)
    monkeypatch.setenv("OFFBOOK_API_KEY", str(api.key))
    words = f"--scenarios s.jsonl --model {model.name} --base-model tiny --group-size 4 --steps 2 --learning-rate 1e-3"
    assert run(["train", "--command", f"{sys.executable} {agent} {{prompt}}", *words.split()]) == 0
    assert "step 2" in capsys.readouterr().out
    assert asyncio.run(recorded_calls(api, "none")) == ()
