"""Programs run, bounded and ended: real processes, and none of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from offbook.base.errors import RolloutError
from offbook.processes.program import KEPT_BYTES, Ending, ProgramOutput, run_program

FAMILY = """
    import os, subprocess, sys, time
    sleeper = [sys.executable, "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    for session in (False, True):
        subprocess.Popen(sleeper, start_new_session=session)
    if os.fork() == 0:  # a daemon: its parent ends, and it has a session of its own
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execv(sleeper[0], sleeper)
    print("born", flush=True)
    time.sleep(float(sys.argv[1]))
"""
"""A program that starts a child, a child in another session and a daemon; each ignores SIGTERM. ARGV[1]: seconds to live."""


def marked(mark: str) -> list[int]:
    """The running processes whose environment has OFFBOOK_TEST_MARK=mark."""
    pids: list[int] = []
    for folder in Path("/proc").iterdir():
        try:
            found = f"OFFBOOK_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            alive = folder.name.isdigit() and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if found and alive:
            pids.append(int(folder.name))
    return pids


def becomes(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # once is enough: a process that another one replaces is missing for a moment
            return True
        time.sleep(0.01)
    return False


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-S", "-c", dedent(code), *arguments]


def run(argv: list[str], mark: str = "", timeout: float | None = 30.0, stdin: bytes = b"") -> Ending:
    return asyncio.run(run_program(argv, env=os.environ | {"OFFBOOK_TEST_MARK": mark}, timeout=timeout, stdin=stdin))


def test_a_program_ends_with_its_code_or_its_signal_and_its_output() -> None:
    ending = run(["sh", "-c", "cat; echo no >&2; exit 3"], stdin=b"from stdin")
    assert (str(ending), ending.stdout.text(), ending.stderr.text()) == ("exit code 3", "from stdin", "no\n")
    assert str(run(["sh", "-c", "kill -SEGV $$"])) == "signal 11 (SIGSEGV)"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end the process group alone")
@pytest.mark.parametrize("seconds", ["0", "600"])
def test_nothing_that_a_program_started_is_left_after_its_end_or_its_limit(tmp_path: Path, seconds: str) -> None:
    ending = run(python(FAMILY, seconds), str(tmp_path), timeout=None if seconds == "0" else 1.0)
    assert (ending.timed_out, ending.stdout.text()) == (seconds == "600", "born\n")
    assert marked(str(tmp_path)) == []


def test_a_program_that_ignores_sigterm_is_killed_and_one_that_does_not_may_tidy_up() -> None:
    ending = run(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], timeout=0.3)
    assert (ending.timed_out, ending.code) == (True, -signal.SIGKILL)
    tidy = run(["sh", "-c", "trap 'echo tidy; exit 7' TERM; while :; do sleep 0.1; done"], timeout=1.0)
    assert (tidy.timed_out, tidy.code, tidy.stdout.text()) == (True, 7, "tidy\n")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end the process group alone")
def test_a_cancelled_rollout_leaves_no_process(tmp_path: Path) -> None:
    async def cancelled() -> None:
        environment = os.environ | {"OFFBOOK_TEST_MARK": str(tmp_path)}
        task = asyncio.create_task(run_program(python(FAMILY, "600"), env=environment))
        while len(marked(str(tmp_path))) < 5:  # supervisor, program, two children, daemon
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert marked(str(tmp_path)) == []

    asyncio.run(asyncio.wait_for(cancelled(), 30))


TRAINER = """
    import asyncio, os, sys
    from offbook.processes.program import run_program
    asyncio.run(run_program(sys.argv[1:], env=os.environ))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end the process group alone")
@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_a_trainer_killed_in_any_phase_leaves_no_process(tmp_path: Path, processes: int) -> None:
    """Killed by signal 9 once so many processes run: itself, the supervisor, the program, its children."""
    mark = str(tmp_path)
    argv = [sys.executable, "-c", dedent(TRAINER), *python(FAMILY, "600")]
    trainer = subprocess.Popen(argv, env=os.environ | {"OFFBOOK_TEST_MARK": mark}, stdout=subprocess.DEVNULL)
    try:
        assert becomes(lambda: len(marked(mark)) >= processes)
    finally:
        trainer.kill()
        trainer.wait()
    assert becomes(lambda: not marked(mark)), marked(mark)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_killed_supervisor_takes_its_program_along_and_the_rollout_fails(tmp_path: Path) -> None:
    async def killed() -> None:
        environment = os.environ | {"OFFBOOK_TEST_MARK": str(tmp_path)}
        task = asyncio.create_task(run_program(["sleep", "600"], env=environment))
        while len(pids := marked(str(tmp_path))) < 2:
            await asyncio.sleep(0.01)
        os.kill(min(pids), signal.SIGKILL)
        with pytest.raises(RolloutError, match="its supervisor was killed"):
            await task

    asyncio.run(asyncio.wait_for(killed(), 30))
    assert becomes(lambda: not marked(str(tmp_path)))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no-such-program"], "could not be started: FileNotFoundError"),
        (["echo", "a\0b"], "could not be started"),
        (["echo", "x" * 2**18], "Argument list too long"),
    ],
)
def test_a_program_that_cannot_start_says_why(argv: list[str], said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        run(argv)


def test_a_flood_on_stdout_is_bounded_and_its_last_reward_line_is_found() -> None:
    ending = run(["sh", "-c", "echo first; yes | head -c 20000000; echo; echo reward: 0.25"])
    text = ending.stdout.text()
    assert len(text) < 2 * KEPT_BYTES + 100
    assert text.startswith("first\ny\n")
    assert "bytes left out" in text
    assert ending.stdout.reward == "0.25"


def test_the_reward_is_the_last_whole_line_wherever_the_output_is_cut() -> None:
    text = (
        b"reward: 1\nmy reward: 2\nreward: 3\n" + b"reward: 4 " * 300 + b"\n" + b"x" * 500 + b"reward: 5\nreward: 6 7\n"
    )
    for size in (1, 2, 7, 199, 5000):
        output = ProgramOutput()
        for start in range(0, len(text), size):
            output.add(text[start : start + size])
        output.end()
        assert output.reward == "3"
    output.add(b"reward: 8\r\nreward: nan")
    output.end()
    assert output.reward == "nan"
