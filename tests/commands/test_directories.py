"""Commands on a directory, without a server: they need no torch, and reading changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offbook.base.errors import install_command
from tests.paths import ROOT

WRITTEN = ROOT / "tests/server/written_directory/files"
ENGINES = ("torch", "transformers", "peft", "xgrammar", "unsloth", "vllm", "bitsandbytes", "trl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of a server that has ended."""
    shutil.copytree(WRITTEN, tmp_path / "server")
    return tmp_path / "server"


def offbook(words: str, folder: Path, *hidden: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that has none of the hidden packages."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))"
    code = f"{hide}; from offbook.commands.main import main; sys.argv[0] = 'offbook'; main()"
    command = [sys.executable, "-c", code, *words.split(), "--dir", str(folder)]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=120, check=False)


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time of modification and its content."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_directory_is_read_without_torch_and_nothing_in_it_changes(folder: Path) -> None:
    before = state(folder)
    runs = offbook("runs --json", folder, *ENGINES)
    assert runs.returncode == 0, runs.stderr
    assert json.loads(runs.stdout)
    assert offbook("checkpoints agent", folder, *ENGINES).returncode == 0
    page = offbook("ui --host nowhere.invalid", folder, *ENGINES)  # all is imported before the address is refused
    assert (page.returncode, "OFFBOOK_API_KEY" in page.stderr) == (2, True), page.stderr
    shown = offbook("show nobody", folder, *ENGINES)
    assert (shown.returncode, "nobody" in shown.stderr) == (2, True)
    assert state(folder) == before


def test_a_directory_is_checked_and_copied_without_torch(folder: Path) -> None:
    verified = offbook("verify", folder, *ENGINES, "openai")  # whose import costs more than the check
    assert (verified.returncode, "0 damaged" in verified.stdout) == (0, True), verified.stderr
    copied = offbook("backup --output copy", folder, *ENGINES)
    assert copied.returncode == 0, copied.stderr
    assert (folder.parent / "copy/records.db").is_file()


def test_a_directory_without_the_packages_that_read_it_names_the_extra(folder: Path) -> None:
    done = offbook("runs", folder, "sqlalchemy")
    assert done.returncode == 1
    assert done.stderr == f"offbook: sqlalchemy is not installed: {install_command('ui')}\n"


def test_no_folder_is_said_without_openai_or_a_web_framework(tmp_path: Path) -> None:
    code = (
        "import sys; from offbook.commands.main import run; code = run(['runs', '--dir', 'nowhere'])\n"
        "print(code, sorted({'openai', 'fastapi', 'litellm', 'torch', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert (done.stdout, "there is no folder" in done.stderr) == ("2 []\n", True)
