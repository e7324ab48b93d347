"""The Dockerfile without Docker: a linter reads it, its command is run by a shell, and its context makes the wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbook.base.server_options import ServerOptions
from offbook.commands import main, serve
from tests.paths import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")


def instruction(name: str) -> str:
    """What the last instruction of this name says."""
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)[-1]


def served(folder: Path, **environment: str) -> list[str]:
    """The key that the container's command hands on, and its arguments; a shell runs it with a command of our own."""
    command = folder / "offbook"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$OFFBOOK_API_KEY" "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        json.loads(instruction("CMD")), env=path | environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_a_linter_has_nothing_to_say(require: Callable[[bool, str], None]) -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.prefix) / "bin")) or shutil.which("hadolint")
    require(linter is not None, "pip install -r requirements/test.txt")
    done = subprocess.run(
        [str(linter), str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_model_and_key_come_from_the_environment_and_the_server_takes_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, command, *words = served(tmp_path, MODEL="Qwen/Qwen2.5-7B-Instruct", API_KEY="a b$c")
    assert (key, command) == ("a b$c", "serve")
    taken: list[ServerOptions] = []
    monkeypatch.setattr(serve, "run_server", lambda options: taken.append(options) or 0)
    assert main.run([command, *words]) == 0
    [options] = taken
    assert (options.model, options.host, options.port) == ("Qwen/Qwen2.5-7B-Instruct", "0.0.0.0", 8000)


def test_the_other_name_of_the_key_counts_too_and_none_leaves_it_to_the_server(tmp_path: Path) -> None:
    assert served(tmp_path, MODEL="tiny", OFFBOOK_API_KEY="k")[0] == "k"
    assert served(tmp_path, MODEL="tiny")[0] == ""


def test_it_keeps_everything_in_its_volume_and_runs_as_no_root() -> None:
    assert instruction("VOLUME") == instruction("WORKDIR") == "/data"
    settings = dict(word.split("=") for word in instruction("ENV").split())
    assert settings == {"MODEL": "tiny", "OFFBOOK_DIR": "/data", "HF_HOME": "/data/huggingface"}
    assert (instruction("USER"), instruction("EXPOSE")) == ("1000", "8000")


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_what_the_context_holds_is_enough_for_the_wheel(tmp_path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    context = tmp_path / "context"
    context.mkdir()
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, context)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(context)],
        check=True, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert list(tmp_path.glob("offbook-*.whl"))
