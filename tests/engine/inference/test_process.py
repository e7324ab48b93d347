"""The engine as a process: its options, its port, its parent."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from offbook.engine.inference.embedded import main
from tests.engine.inference.engines import DEADLINE, until_healthy


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "offbook.engine.inference.embedded", *argv(folder, *options)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def argv(folder: Path, *options: str) -> list[str]:
    return ["--model", str(folder), "--served-model-name", "base", "--device", "cpu", "--threads", "1", *options]


def test_a_taken_port_is_said_and_ends_the_process(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(argv(folder, "--port", str(port))) == 3
    assert f"--port {port}" in caplog.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--max-model-len", "100000"], "--max-model-len"),
        (["--max-batch", "0"], "--max-batch"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "int3"], "--dtype"),
        (["--device", "abacus"], "--device"),
        (["--model", "/nowhere"], "--model"),
    ],
)
def test_a_wrong_option_is_named_and_ends_the_process(
    folder: Path, caplog: pytest.LogCaptureFixture, options: list[str], named: str
) -> None:
    assert main(argv(folder, "--port", "0", *options)) == 2
    assert named in caplog.text


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_it_ends_when_its_parent_is_gone(folder: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(folder, "--port", str(port), "--parent-pid", str(parent.pid))
    try:
        until_healthy(f"http://127.0.0.1:{port}")
        parent.kill()
        parent.wait()
        process.communicate(timeout=DEADLINE)
        assert process.returncode == 0
    finally:
        process.kill()
        assert parent.stdin is not None
        parent.stdin.close()


def test_no_process_by_that_parent_id_ends_it_at_once(folder: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = start(folder, "--port", "0", "--parent-pid", str(gone.pid))
    _, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert "--parent-pid" in said
