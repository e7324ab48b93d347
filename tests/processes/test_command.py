"""`Command`: programs as rollouts, against the real server over a scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbook import Command, RemoteBackend, TrainableModel, Trajectory
from offbook.base.errors import ConfigError
from offbook.client.rollouts.capture import at_temperature
from offbook.testing import Action, ScriptedServer, scripted_server

AGENT = """
import json, os, sys, urllib.request
def call(text, **more):
    body = {"model": os.environ["OFFBOOK_MODEL"], "messages": [{"role": "user", "content": text}]} | more
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
def reward(value):
    open(os.environ["OFFBOOK_REWARD_FILE"], "w").write(str(value))
"""
"""The beginning of each program of these tests."""


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server(lambda body: Action("answer")) as running:
        yield running


def rolled(server: ScriptedServer, code: str, scenario: object = "hello", *words: str, **options: Any) -> Trajectory:
    """The rollout of a program of Python with these arguments."""
    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server.url))
    command = Command([sys.executable, "-S", "-c", AGENT + code, *words], **{"timeout": 60, **options})
    return asyncio.run(command(model, scenario))


def failure(trajectory: Trajectory) -> str:
    """Why a rollout failed; it has no reward."""
    assert trajectory.reward is None
    assert trajectory.exception is not None
    return trajectory.exception.message


def test_its_calls_its_reward_and_its_output_are_the_trajectory(server: ScriptedServer) -> None:
    code = "print(call(sys.argv[1])); print('done', file=sys.stderr); reward('{\"reward\": 0.5, \"tests\": 3}')"
    trajectory = rolled(server, code, {"prompt": "fix it"}, "{prompt}")
    assert trajectory.exception is None
    assert (trajectory.reward, trajectory.metrics["tests"], trajectory.metadata["exit_code"]) == (0.5, 3.0, 0)
    assert [message.get("content") for message in trajectory.messages()] == ["fix it", "answer"]
    assert trajectory.logs == ["stdout of the program:\nanswer\n", "stderr of the program:\ndone\n"]
    [call] = server.calls(trajectory.id)
    assert call.outputs[0].token_ids


OWN_MODELS = """
def post(variable, path, body, method="POST"):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(os.environ[variable] + path, data, headers, method=method)
    return json.load(urllib.request.urlopen(request))
hi = [{"role": "user", "content": "hi"}]
parts = [{"role": "user", "parts": [{"text": "hi"}]}]
post("OPENAI_BASE_URL", "/chat/completions", {"model": "gpt-4o-mini", "messages": hi})
post("OPENAI_API_BASE", "/responses", {"model": "openai/o4-mini", "input": "hi"})
post("ANTHROPIC_BASE_URL", "/v1/messages", {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": hi})
post("GOOGLE_GEMINI_BASE_URL", "/v1beta/models/gemini-2.5-flash:generateContent", {"contents": parts})
post("GEMINI_API_BASE", "/models/gemini-2.5-pro:generateContent", {"contents": parts})
post("OPENAI_BASE_URL", "/completions", {"model": "davinci-002", "prompt": "hi"})
print(post("OPENAI_BASE_URL", "/models/gpt-4o-mini", None, "GET")["id"])
reward(1)
"""


def test_a_program_that_names_models_of_its_own_is_answered_in_every_api(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    with at_temperature(0.0):
        trajectory = rolled(server, OWN_MODELS)
    assert (trajectory.exception, trajectory.reward) == (None, 1.0)
    assert trajectory.logs == ["stdout of the program:\ngpt-4o-mini\n"]
    calls = server.calls(trajectory.id)
    assert [(call.model, call.sampling.temperature) for call in calls] == [("agent", 0.0)] * 6
    names = ["gpt-4o-mini", "openai/o4-mini", "claude-sonnet-4-5", "gemini-2.5-flash", "gemini-2.5-pro", "davinci-002"]
    assert [call.origin and call.origin.model for call in calls] == names
    [line] = [record.message for record in caplog.records if "the program named" in record.message]
    assert "named 6 models, and agent answered for all: gpt-4o-mini (1 call), " in line and "judge" in line


@pytest.mark.parametrize("text", ['say "it\'s"\ntwo\tlines', "${HOME} $(id) {prompt} né 猫 \u202e", "-p", ""])
def test_a_scenario_arrives_as_it_is_by_argument_stdin_variable_and_file(server: ScriptedServer, text: str) -> None:
    code = (
        "call('x'); own = json.loads(os.environ['OFFBOOK_SCENARIO'])['prompt']\n"
        "file = json.load(open(os.environ['OFFBOOK_SCENARIO_FILE']))['prompt']\n"
        "seen = [sys.argv[1], json.loads(sys.argv[2])['prompt'], sys.stdin.read(), own, file]\n"
        "print(json.dumps(seen)); reward(1)"
    )
    trajectory = rolled(server, code, {"prompt": text}, "{prompt}", "{scenario}", stdin="{prompt}")
    assert trajectory.reward == 1.0
    assert json.loads(trajectory.logs[0].split("\n", 1)[1]) == [text] * 5


def test_a_nul_cannot_be_an_argument_but_arrives_by_stdin_and_file(server: ScriptedServer) -> None:
    code = "call('x'); reward(float(sys.stdin.read() == json.loads(os.environ['OFFBOOK_SCENARIO']) == 'a\\0b'))"
    assert rolled(server, code, "a\0b", stdin="{text}").reward == 1.0
    assert "could not be started" in failure(rolled(server, code, "a\0b", "{text}"))


def test_a_long_scenario_arrives_by_file(server: ScriptedServer) -> None:
    code = (
        "call('x'); assert 'OFFBOOK_SCENARIO' not in os.environ\n"
        "reward(len(json.load(open(os.environ['OFFBOOK_SCENARIO_FILE']))))"
    )
    assert rolled(server, code, "x" * 200_000).reward == 200_000.0


def test_an_unknown_placeholder_names_those_that_exist(server: ScriptedServer) -> None:
    with pytest.raises(
        ConfigError, match=r"\{promt\} in '\{promt\}' is not a field of the scenario; its fields are \{prompt\}"
    ):
        rolled(server, "", {"prompt": "x"}, "{promt}")


@pytest.mark.parametrize(
    ("source", "code", "reward"),
    [
        ("file", "reward(' -2.5 ')", -2.5),
        ("line", "print('reward: 0.1'); print('reward: 0.75')", 0.75),
        ("exit", "sys.exit(0)", 1.0),
        ("exit", "sys.exit(5)", 0.0),
        ("none", "sys.exit(1)", None),
        ("file", "reward(1); sys.exit(1)", 1.0),
    ],
)
def test_the_reward_comes_from_file_line_or_exit_code(
    server: ScriptedServer, source: str, code: str, reward: float | None
) -> None:
    trajectory = rolled(server, f"call('x'); {code}", reward=source)
    assert (trajectory.reward, trajectory.exception) == (reward, None)


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        (
            "file",
            "raise SystemExit('no luck')",
            "wrote no reward to $OFFBOOK_REWARD_FILE and ended with exit code 1: no luck",
        ),
        (
            "file",
            "import atexit; atexit.register(sys.stderr.write, 'nanobind: leaked 3 types!\\n - ... skipped remainder\\n' * 9); 1 + None",
            "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'",
        ),
        ("file", "reward('nan')", "a finite number is needed"),
        ("file", "reward('good')", "has 'good'; a number"),
        ("file", "reward('{')", "has '{'; a number"),
        ("file", "reward('{\"score\": 1}')", "without `reward`"),
        ("file", "os.mkfifo(os.environ['OFFBOOK_REWARD_FILE'])", "wrote no reward"),
        ("line", "print('reward 1')", "wrote no line `reward: x` to stdout and ended with exit code 0"),
        ("line", "print('reward: inf')", "a finite number is needed"),
        ("exit", "os.abort()", "signal 6 (SIGABRT), which is not a reward"),
        ("exit", "sys.exit(127)", "exit code 127, which is not a reward"),
    ],
)
def test_no_reward_is_a_failed_rollout_and_never_0(server: ScriptedServer, source: str, code: str, said: str) -> None:
    trajectory = rolled(server, f"call('x'); {code}", reward=source)
    assert said in failure(trajectory)
    assert len(trajectory.messages()) == 2, "its calls are kept"


def test_a_program_that_makes_no_call_or_is_stopped_is_a_failed_rollout(server: ScriptedServer) -> None:
    said = failure(rolled(server, "print('lost'); reward(1)"))
    assert "made no call that was answered" in said
    assert "lost" in said
    late = rolled(server, "call('x'); reward(1); print('waiting', flush=True); import time; time.sleep(600)", timeout=3)
    assert "was stopped after timeout=3 s: waiting" in failure(late)
    assert late.logs == ["stdout of the program:\nwaiting\n"]


def test_each_rollout_gets_a_fresh_copy_of_the_folder_and_none_is_left(server: ScriptedServer, tmp_path: Path) -> None:
    source = tmp_path / "repos" / "one"
    (source / "inner").mkdir(parents=True)
    (source / "count").write_text("1")
    code = (
        "call('x'); count = int(open('count').read()); open('count', 'w').write(str(count + 1)); print(os.getcwd())\n"
        "os.chmod('inner', 0o500); reward(count)"
    )
    for _ in range(2):
        trajectory = rolled(server, code, {"prompt": "x", "repo": "one"}, folder=str(tmp_path / "repos" / "{repo}"))
        assert trajectory.reward == 1.0
        assert not Path(trajectory.logs[0].split("\n")[1]).exists()
    assert (source / "count").read_text() == "1"
    with pytest.raises(Exception, match="could not be copied"):
        rolled(server, code, folder=str(tmp_path / "missing"))


def test_a_grader_runs_outside_with_the_trainers_own_keys(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the judge's key")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    grader = tmp_path / "grade.py"
    grader.write_text(
        "import json, os\n"
        "own = os.environ['OPENAI_API_KEY'] == 'the judge\\'s key' and 'OPENAI_BASE_URL' not in os.environ\n"
        "made = open('made').read() == json.loads(os.environ['OFFBOOK_SCENARIO'])['prompt']\n"
        "open(os.environ['OFFBOOK_REWARD_FILE'], 'w').write(str(float(own and made)))\n"
        "print('graded')\n"
    )
    source = tmp_path / "work"
    source.mkdir()
    code = (
        "call('x'); open('made', 'w').write('p'); reward(99)\n"
        "open(os.path.dirname(os.environ['OFFBOOK_REWARD_FILE']) + '/graded', 'w').write('99')"
    )
    options = {"folder": str(source), "grader": f"{sys.executable} {grader}"}
    trajectory = rolled(server, code, {"prompt": "p"}, **options)
    assert (trajectory.reward, trajectory.exception) == (1.0, None)
    assert trajectory.logs == ["stdout of the grader:\ngraded\n"]
    grader.write_text("pass")
    assert "the grader wrote no reward" in failure(rolled(server, code, {"prompt": "p"}, **options))


def test_a_prefix_runs_the_program_in_a_sandbox(server: ScriptedServer, tmp_path: Path) -> None:
    sandbox = tmp_path / "sandbox.sh"
    sandbox.write_text('#!/bin/sh\ngrep -q "^OPENAI_BASE_URL=http" "$2" && cd "$1" || exit 9\nshift 2\nexec "$@"\n')
    sandbox.chmod(0o755)
    trajectory = rolled(server, "call('x'); reward(1)", inside=f"{sandbox} {{folder}} {{env_file}}")
    assert (trajectory.reward, trajectory.exception) == (1.0, None)


def test_variables_files_and_proxies_lead_each_client_to_the_server(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    code = (
        "import tomllib; call('x'); files = {'env': dict(os.environ)}\n"
        "files['codex'] = tomllib.load(open(os.environ['CODEX_HOME'] + '/config.toml', 'rb'))\n"
        "files['gemini'] = json.load(open(os.environ['GEMINI_CLI_HOME'] + '/.gemini/settings.json'))\n"
        "files['claude'] = os.listdir(os.environ['CLAUDE_CONFIG_DIR']); print(json.dumps(files)); reward(1)"
    )
    trajectory = rolled(server, code)
    assert trajectory.reward == 1.0
    seen = json.loads(trajectory.logs[0].split("\n", 1)[1])
    env, root = seen["env"], f"{server.url}/m/agent/t/{trajectory.id}"
    assert (env["OPENAI_BASE_URL"], env["ANTHROPIC_BASE_URL"], env["GOOGLE_GEMINI_BASE_URL"]) == (
        f"{root}/v1",
        root,
        root,
    )
    assert env["NO_PROXY"] == env["no_proxy"] == "corp.example,127.0.0.1,localhost"
    assert "CLAUDE_CODE_USE_BEDROCK" not in env
    assert seen["codex"]["model_providers"][seen["codex"]["model_provider"]]["base_url"] == f"{root}/v1"
    assert seen["gemini"]["security"]["auth"]["selectedType"] == "gemini-api-key"
    assert seen["claude"] == []


def test_a_program_gets_no_key_of_the_trainer_but_those_named_for_it(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBOOK_API_KEY", "the server's")
    for name in ("JUDGE_API_KEY", "HF_TOKEN", "DATABASE_PASSWORD", "SEARCH_API_KEY"):
        monkeypatch.setenv(name, "the trainer's own")
    monkeypatch.setenv("TOOL_HOME", "/tools")
    trajectory = rolled(
        server, "call('x'); reward(1); print(json.dumps(dict(os.environ)))", env={"SEARCH_API_KEY": "the program's"}
    )
    assert trajectory.reward == 1.0
    seen = json.loads(trajectory.logs[0].split("\n", 1)[1])
    assert "the trainer's own" not in seen.values()
    assert "OFFBOOK_API_KEY" not in seen, "the server's key has the names that SDKs read"
    assert (seen["SEARCH_API_KEY"], seen["TOOL_HOME"]) == ("the program's", "/tools")


HELD_BACK = {
    "DATABASE_URL": "postgres://shop:hunter2@db/shop",
    "GITHUB_PAT": "of a form that nobody knows",
    "MYSQL_PWD": "hunter2",
    "PIP_INDEX_URL": "https://__token__:hunter2@index.example/simple",
    "GIT_REMOTE": "https://ghp_0123456789abcdefghij@github.com/shop/app",
    "STORAGE": "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=aHVudGVyMg==;EndpointSuffix=core.windows.net",
    "ODBC": "Driver={SQL};Server=db;Uid=shop;Pwd=hunter2;",
    "DOCKER_AUTH_CONFIG": '{"auths": {"registry.example": {"auth": "c2hvcDpodW50ZXIy"}}}',
    "HOOK": "https://hooks.example/run?api_key=hunter2",
    "SIGNING": "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
}
PASSED = {
    "SEARCH_URL": "https://search.example/v1?q=password+reset",
    "OLDPWD": "/home/shop",
    "SSH_ASKPASS": "/usr/bin/askpass",
    "MAX_TOKENS": "4096",
    "GIT_AUTHOR_NAME": "Zoë",
    "LS_COLORS": "rs=0:di=01;34:ln=01;36",
    "DATABASE_HOST": "postgres://db/shop",
}


def test_values_that_look_like_keys_are_held_back_and_their_names_told_once(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (HELD_BACK | PASSED).items():
        monkeypatch.setenv(name, value)
    code = AGENT + "call('x'); reward(1); print(json.dumps(dict(os.environ)))"
    agent = Command([sys.executable, "-S", "-c", code], env={"HOOK": "the program's"})
    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server.url))
    for _ in range(2):
        trajectory = asyncio.run(agent(model, "hello"))
        seen = json.loads(trajectory.logs[0].split("\n", 1)[1])
        assert not seen.keys() & HELD_BACK.keys() - {"HOOK"} and seen.items() >= PASSED.items()
        assert seen["HOOK"] == "the program's"
    [line] = [line for line in caplog.messages if "look like secrets" in line]
    assert all(name in line for name in HELD_BACK if name != "HOOK") and "HOOK" not in line
    assert not [value for value in HELD_BACK.values() if value in line] and "hunter2" not in line
    assert "OPENAI_API_KEY" not in line, "the program has one of its own"


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("", {}, "command: a program and its arguments are needed"),
        ("say 'it", {}, "cannot be split"),
        ([1], {}, "command: a program"),
        ("x", {"reward": "files"}, "reward: file, line, exit or none"),
        ("x", {"timeout": 0}, "timeout: seconds above 0"),
        ("x", {"grader": "y", "reward": "none"}, "grader: it gives the reward"),
        ("x", {"time_limit": 3}, "time_limit"),
    ],
)
def test_wrong_options_are_named(command: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Command(command, **options)


@pytest.mark.parametrize(("forced", "sampled"), [(0.0, 0.0), (0.5, 0.5), (None, 0.9)])
def test_an_evaluation_samples_at_its_own_temperature_whatever_the_program_asks_for(
    server: ScriptedServer, forced: float | None, sampled: float
) -> None:
    with at_temperature(forced):
        trajectory = rolled(server, "call('x', temperature=0.9); reward(1)")
    assert (trajectory.reward, trajectory.exception) == (1.0, None)
    assert [call.sampling.temperature for call in server.calls(trajectory.id)] == [sampled]


def test_curl_in_a_shell_is_a_rollout(server: ScriptedServer) -> None:
    model = TrainableModel("agent", base_model="tiny", backend=RemoteBackend(server.url))
    script = (
        'curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: '
        'application/json" -d "{\\"model\\": \\"$OFFBOOK_MODEL\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": '
        '\\"hi\\"}]}" | grep -q answer'
    )
    trajectory = asyncio.run(Command(["sh", "-c", script], reward="exit", timeout=60)(model, "hi"))
    assert (trajectory.reward, trajectory.exception) == (1.0, None)
    assert os.environ.get("OPENAI_BASE_URL") is None
