"""Ctrl-C in a script: one line says where the run is and what it waits for, and no traceback follows."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.scripted_training import ScriptedTraining, scripted_training

SCRIPT = """
import asyncio
import signal
import sys

import offbook

signal.signal(signal.SIGINT, signal.default_int_handler)  # the background jobs of a shell ignore it

model = offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend(sys.argv[1]))


async def rollout(model, scenario):
    print("begun", flush=True)
    await asyncio.Event().wait()


trainer = offbook.Trainer(model, rollout, ["train"], eval=["eval"], group_size=2)
{call}
"""
WAITING = "interrupted after step 0 of 3: run the same again to continue from there. Waiting for: evaluating step 0 on 1 scenario"
CALLS = {
    "trainer.train(3)": WAITING,
    "trainer.evaluate()": None,
}


@pytest.fixture
def server() -> Iterator[ScriptedTraining]:
    with scripted_training() as training:
        yield training


@pytest.mark.parametrize("call", CALLS)
def test_a_script_ends_without_a_traceback(server: ScriptedTraining, call: str, tmp_path: Path) -> None:
    with interrupted(server, call, tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()) == (-signal.SIGINT, ["offbook: interrupted"])
    assert CALLS[call] is None or CALLS[call] in out.splitlines()


def test_a_script_may_catch_the_interrupt_and_its_other_errors_keep_their_tracebacks(
    server: ScriptedTraining, tmp_path: Path
) -> None:
    call = "try:\n    trainer.train(3)\nexcept KeyboardInterrupt:\n    raise ValueError('of the script')"
    with interrupted(server, call, tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" in err and err.endswith("ValueError: of the script\n") and WAITING in out


@contextmanager
def interrupted(server: ScriptedTraining, call: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The script, interrupted when its first rollout has begun. Killed at the end, if it still runs."""
    assert server.api is not None
    command = [sys.executable, "-c", SCRIPT.format(call=call), server.api.url]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() not in ("begun\n", ""):
        continue
    process.send_signal(signal.SIGINT)
    try:
        yield process
    finally:
        process.kill()
