"""The command line: bad input is one sentence and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from offbook import LocalBackend
from offbook.base.errors import ConfigError, LeakError, install_command
from offbook.base.types import new_id
from offbook.commands.main import guarded, run
from offbook.trainer.trainable_target import load_target

COMMAND = [sys.executable, "-c", "import sys; from offbook.commands.main import main; sys.argv[0] = 'offbook'; main()"]


def offbook(words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run([*COMMAND, *words.split()], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def called(words: str) -> int:
    """The exit code of the command, run here."""
    return run(words.split())


def test_it_says_its_version(tmp_path: Path) -> None:
    done = offbook("--version", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"offbook {version('offbook')}\n")


APP = """
import json
from offbook.trainer.evaluate import Evaluation

class Agent:
    def train(self, scenarios, **options):
        self.say("train", scenarios, options)

    def evaluate(self, scenarios, **options):
        self.say("evaluate", scenarios, options)
        return Evaluation(3, 0.5, 2, 2, 0, 0.25, 0.0, 0.125, {"success": 0.5}, {"agent": 3})

    def say(self, method, scenarios, options):
        shown = {name: getattr(value, "name", None) or value for name, value in options.items()}
        if config := shown.get("config"):
            shown["config"] = [config.learning_rate, config.overlap]
        print(json.dumps([method, len(scenarios), shown], default=repr))

agent = Agent()
def plain(scenario): return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, a project: an app that says what it was asked, and a scenario."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "hi"}\n')
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("app", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train app:agent --scenarios none.jsonl", "scenarios: none.jsonl cannot be read: No such file"),
        ("train app:agent --scenarios .", "is not a file that ends in .jsonl, .json, .csv"),
        ("train app:agent --scenarios data.jsonl --eval none.csv", "scenarios: none.csv cannot be read: No such file"),
        ("train app:agent --scenarios data.jsonl --loss ppo", "Invalid value for '--loss'"),
        ("train app:agent --scenarios data.jsonl --learning-rate -1", "TrainConfig.learning_rate"),
        ("train app:agent --scenarios data.jsonl --steps 0", "Invalid value for '--steps'"),
        ("train app:agent --scenarios data.jsonl --group-size 1", "Invalid value for '--group-size'"),
        ("train app:agent --scenarios data.jsonl --retries -1", "Invalid value for '--retries'"),
        (
            "eval app:agent --scenarios data.jsonl --max-completion-tokens 0",
            "Invalid value for '--max-completion-tokens'",
        ),
        ("train app:agent --scenarios data.jsonl --patience 0", "Invalid value for '--patience'"),
        ("train app:agent --scenarios data.jsonl --model a", "--model needs --base-model too"),
        ("train app:agent --scenarios data.jsonl --base-model tiny", "--base-model needs --model too"),
        (
            "train app:agent --scenarios data.jsonl --trace jsonl:data.jsonl",
            "the folder of 'jsonl:data.jsonl' cannot be created",
        ),
        ("train app:agent --scenarios data.jsonl --set betas=[1", "--betas: not JSON"),
        ("train app:agent --scenarios data.jsonl --set lr=1", "--set: there is no option 'lr': use learning_rate=..."),
        ("train app:agent --scenarios data.jsonl --set epochs", "--set 'epochs' is not of the form NAME=VALUE"),
        ("train app:agent --scenarios data.jsonl --config none.toml", "--config: none.toml cannot be read"),
        ("train app:agent", "Missing option '--scenarios'"),
        ("train app:plain --scenarios data.jsonl", "app:plain is of type function, which has no train()"),
        ("train app:Agent --scenarios data.jsonl", "app:Agent is the class Agent"),
        ("train app.py:agent --scenarios data.jsonl", "'app.py' is a file; name its module, app:agent"),
        ("eval app:agent --scenarios data.jsonl --results none/out.json", "--results: none/out.json cannot be written"),
        ("eval app:agent --scenarios data.jsonl --temperature 101", "--temperature: Input should be "),
        ("eval nowhere:agent --scenarios data.jsonl", "there is no module 'nowhere'"),
        ("checkpoints agent --dir .", "there is no model 'agent'"),
        ("export agent --output lora --format gguf", "'gguf' must be one of peft, merged, gguf-ready"),
        ("quickstart --steps 0", "--steps"),
        ("wrap --timeout nan -- true", "--timeout: a finite number is needed, got nan"),
        ("train app:agent --scenarios data.jsonl --max-cost nan", "--max-cost: a finite number is needed, got nan"),
        ("tran", "tran"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert called(words) == 2
    said = capsys.readouterr()
    assert (said.out, message in said.err) == ("", True), said.err


def test_options_reach_the_target_and_a_model_only_when_it_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "train app:agent --scenarios data.jsonl --steps 3 --eval data.jsonl --eval-every 2 --group-size 4 --retries 1 "
        "--scenarios-per-step 2 --concurrency 5 --timeout 60 --patience 7 --target-reward 0.9 --learning-rate 0.5 --overlap "
        "--seed 6 --max-completion-tokens 99 --replayed 9"
    )
    assert called(given) == 0
    method, count, options = json.loads(capsys.readouterr().out)
    assert (method, count, len(options.pop("eval"))) == ("train", 1, 1)
    assert options == {
        "steps": 3,
        "eval_every": 2,
        "group_size": 4,
        "scenarios_per_step": 2,
        "concurrency": 5,
        "timeout": 60.0,
        "retries": 1,
        "replayed": 9,
        "patience": 7,
        "target_reward": 0.9,
        "config": [0.5, True],
        "seed": 6,
        "max_completion_tokens": 99,
    }
    called("train app:agent --scenarios data.jsonl --model mine --base-model tiny")
    assert json.loads(capsys.readouterr().out)[2]["model"] == "mine"


def test_a_runner_of_the_rollouts_is_passed_by_its_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("train app:agent --scenarios data.jsonl --runner ray") == 0
    assert json.loads(capsys.readouterr().out)[2]["runner"] == "ray"


def test_a_budget_reaches_the_target_only_where_one_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    called("train app:agent --scenarios data.jsonl --max-cost 2.5")
    assert json.loads(capsys.readouterr().out)[2]["max_cost"] == 2.5
    called("train app:agent --scenarios data.jsonl")
    assert "max_cost" not in json.loads(capsys.readouterr().out)[2]


def test_an_evaluation_is_one_line_and_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "eval app:agent --scenarios data.jsonl --temperature 0.5 --rollouts 2 --retries 1 --results out.json"
    words += " --max-completion-tokens 99"
    assert called(words) == 0
    asked, line = capsys.readouterr().out.splitlines()
    options = {"temperature": 0.5, "rollouts": 2, "retries": 1}
    options["max_completion_tokens"] = 99
    assert json.loads(asked) == ["evaluate", 1, options]
    assert line == "step 3, sampled at temperature 0.5, 2 scenarios: success 50%, reward 0.250"
    found = json.loads((folder / "out.json").read_text())
    assert (found["step"], found["reward"], found["success"], found["steps"]) == (3, 0.25, 0.5, {"agent": 3})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        (
            "import offbook; offbook.TrainableModel(name='bad name', base_model='tiny')",
            "ConfigError: name: 'bad name'",
        ),
    ],
)
def test_what_the_users_module_raises_keeps_its_traceback(folder: Path, line: str, error: str) -> None:
    (folder / "broken.py").write_text(f"x = 1\n{line}\n")
    done = offbook("train broken:agent --scenarios data.jsonl", cwd=folder)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert 'broken.py", line 2' in done.stderr
    assert error in done.stderr


def test_a_call_past_the_capture_is_one_sentence_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    def leaking() -> None:
        raise LeakError("POST https://api.example.com/v1/chat/completions left at app.py:3")

    assert guarded(leaking) == 1
    assert capsys.readouterr().err == "offbook: POST https://api.example.com/v1/chat/completions left at app.py:3\n"


AGENT = """
import zlib
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from offbook_langgraph import trainable

app = create_agent(ChatOpenAI(model="gpt-4.1-mini", api_key="unused", max_tokens=16), [])

@trainable
async def agent(scenario):
    if "box" not in scenario["question"]:
        raise ValueError("no box")
    state = await app.ainvoke({"messages": [("user", scenario["question"])]})
    return zlib.crc32(str(state["messages"][-1].id).encode()) % 97 / 97
"""


async def test_an_agent_is_trained_and_evaluated_from_the_shell(
    tmp_path: Path, local_backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await local_backend.connect("tiny")
    monkeypatch.setenv("OFFBOOK_URL", api.url)
    monkeypatch.setenv("OFFBOOK_API_KEY", api.key or "")
    name = new_id("desk")
    (tmp_path / "desk.py").write_text(AGENT)
    (tmp_path / "data.csv").write_text("question\nwhat is the size of box 4821?\nwhat is the size of box 5913?\n")
    named = f"desk:agent --scenarios data.csv --model {name} --base-model tiny"
    words = f"train {named} --steps 1 --eval data.csv --group-size 4 --scenarios-per-step 1 --trace jsonl:runs"
    done = offbook(words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    watch, *said, end = done.stdout.splitlines()
    before, step, after = [line for line in said if not line.endswith(" ...")]
    assert said[0] == "evaluating step 0 on 2 scenarios ...", "a pipe shows at once what goes on"
    assert re.fullmatch(rf"watch the run: {api.url}/runs/train-\d{{8}}-\d{{6}}-{name}-[0-9a-f]{{4}}", watch)
    assert before.startswith("step 0, greedy, 2 scenarios: reward ")
    assert step.startswith("step 1/1  iteration 1  reward ")
    assert after.startswith("step 1, greedy, 2 scenarios: reward ")
    lora = local_backend.dir / f"default/models/{name}/checkpoints/0001"
    assert end == f"{name} is at step 1. The LoRA is in {lora}"
    assert len((tmp_path / "runs/rollouts.jsonl").read_text().splitlines()) == 2 + 4 + 2
    (tmp_path / "bad.csv").write_text("question\nwhat is the size of box 4821?\nno question\n")
    done = offbook(f"eval {named.replace('data', 'bad')} --run second-look --results out.json", cwd=tmp_path)
    assert (done.returncode, json.loads((tmp_path / "out.json").read_text())["step"]) == (0, 1)
    assert "1 rollout failed: 1 x ValueError: no box" in done.stdout.splitlines()[0]
    assert "rollouts of the evaluation failed" not in done.stderr
    assert "second-look" in offbook(f"runs --dir {local_backend.dir}", cwd=tmp_path).stdout


def test_serve_becomes_the_server_so_that_a_signal_reaches_it(tmp_path: Path) -> None:
    words = ["serve", "--model", "tiny", "--port", "0", "--inference-only", "--dir", str(tmp_path)]
    with subprocess.Popen([*COMMAND, *words], cwd=tmp_path) as process:
        facts = tmp_path / "server.json"
        deadline = time.monotonic() + 120
        while not facts.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert json.loads(facts.read_text())["pid"] == process.pid
        process.terminate()
        assert process.wait(120) == 0
    assert not facts.exists()


@pytest.mark.parametrize(
    ("code", "missing", "extra"),
    [
        ("from offbook.server.__main__ import main; sys.exit(main(['--port', '0']))", "psutil", "server"),
        ("import offbook_langgraph", "langchain_openai", "langgraph"),
    ],
)
def test_a_missing_extra_is_answered_with_the_command_that_installs_it(code: str, missing: str, extra: str) -> None:
    probe = [sys.executable, "-c", f"import sys; sys.modules['{missing}'] = None; {code}"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{missing} is not installed: {install_command(extra)}" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "ui",
        "runs",
        "show",
        "checkpoints",
        "export",
        "verify",
        "backup",
        "push",
        "pull",
        "traces export",
        "doctor",
    ],
)
def test_the_servers_directory_is_always_given_by_an_option_with_the_same_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(f"{command} --help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--dir <path> [^\[]*\[default: \./\.offbook\]", text), text
    assert not re.search(r"^.*(\[dir\]|\{dir\})", text)


def test_the_command_of_an_integration_is_described_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("--help") == 0
    assert "mcp Inspect an MCP server, and train a model" in " ".join(capsys.readouterr().out.split())


def test_an_environment_with_the_first_mcp_sdk_is_told_what_keeps_it_there(tmp_path: Path) -> None:
    facts = tmp_path / "mcp-1.30.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mcp\nVersion: 1.30.0\n")
    probe = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['mcp_types'] = None; import offbook_mcp"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert "mcp 2 (here is mcp 1.30.0, as langchain-mcp-adapters needs it" in done.stderr
    assert f"is not installed: {install_command('mcp')}" in done.stderr


def test_an_interrupted_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    slow_app = typer.Typer()

    @slow_app.command()
    def slow() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        guarded(lambda: slow_app([]))
    assert end.value.code == 130
    assert "offbook: interrupted" in capsys.readouterr().err


def test_targets_are_looked_for_in_the_given_folder(tmp_path: Path) -> None:
    (tmp_path / "desk_app.py").write_text(
        "class Agent:\n    def train(self): ...\n    def evaluate(self): ...\nagent = Agent()\nplain = 3\n"
    )
    assert type(load_target("desk_app:agent", tmp_path)).__name__ == "Agent"
    for text, message in [
        ("desk_app", "not of the form module:name"),
        ("desk_app:other", "it has .*Agent, agent, plain"),
        ("desk_app:agent.train.run", "has no 'agent.train.run'; it has"),
        ("desk_app:plain", "is of type int, which has no train"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_target(text, tmp_path)
