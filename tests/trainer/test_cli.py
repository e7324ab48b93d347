"""The command line: bad input is one sentence and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from understudy.cli import guarded
from understudy.errors import ConfigError
from understudy.trainer.target import load_target

COMMAND = [sys.executable, "-c", "import sys; from understudy.cli import main; sys.argv[0] = 'understudy'; main()"]


def understudy(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "app:agent", "--scenarios", "none.jsonl"), "none.jsonl cannot be read"),
        (("train", "app:agent", "--scenarios", "data.jsonl", "--loss", "ppo"), "TrainConfig.loss"),
        (("eval", "nowhere:agent", "--scenarios", "data.jsonl"), "there is no module 'nowhere'"),
        (("checkpoints", "agent", "--dir", "."), "there is no model 'agent'"),
        (("export", "agent", "--output", "lora", "--format", "gguf"), "'gguf' must be one of peft, merged"),
        (("quickstart", "--steps", "0"), "--steps"),
        (("tran",), "tran"),
    ],
)
def test_bad_input_is_named_and_ends_with_2(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "hi"}\n')
    done = understudy(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


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
        ("from understudy.server.__main__ import main; sys.exit(main(['--port', '0']))", "psutil", "server"),
        ("import understudy_langgraph", "langchain_openai", "langgraph"),
    ],
)
def test_a_missing_extra_is_answered_with_the_command_that_installs_it(code: str, missing: str, extra: str) -> None:
    probe = [sys.executable, "-c", f"import sys; sys.modules['{missing}'] = None; {code}"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f'{missing} is not installed: pip install "understudy[{extra}]"' in done.stderr


def test_an_interrupted_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def slow() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        guarded(lambda: app([]))
    assert end.value.code == 130
    assert "understudy: interrupted" in capsys.readouterr().err


def test_targets_are_looked_for_in_the_given_folder(tmp_path: Path) -> None:
    (tmp_path / "desk_app.py").write_text(
        "class Agent:\n    def train(self): ...\n    def evaluate(self): ...\nagent = Agent()\nplain = 3\n"
    )
    assert type(load_target("desk_app:agent", tmp_path)).__name__ == "Agent"
    for text, message in [
        ("desk_app", "not of the form module:name"),
        ("desk_app:other", "it has .*Agent, agent, plain"),
        ("desk_app:plain", "is int, which has no train"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_target(text, tmp_path)
