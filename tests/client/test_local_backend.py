"""The server that a process starts for itself: shared, watched, and ended with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import offbook
from offbook.base.errors import BackendError, ConfigError
from offbook.commands.checkpoints import list_checkpoints

OWNER = """
import asyncio, json, sys
import offbook
from offbook.base.errors import BackendError

async def main() -> None:
    model = offbook.TrainableModel("agent", base_model="tiny", backend=offbook.LocalBackend(sys.argv[1], threads=1))
    try:
        await model.register()
        print(json.dumps({"url": (await model.api()).url}), flush=True)
    except BackendError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    await asyncio.Event().wait()

asyncio.run(main())
"""


def owner_of(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.1)
    return False


async def test_backends_on_one_directory_share_one_server(local_backend: offbook.LocalBackend) -> None:
    again = offbook.LocalBackend(local_backend.dir)
    first, second = await asyncio.gather(local_backend.connect("tiny"), again.connect("tiny"))
    assert first is second
    other_options = offbook.LocalBackend(local_backend.dir, max_batch=3)
    with pytest.raises(BackendError, match=r"already runs with other options .*close\(\) it first"):
        await other_options.connect("tiny")


@pytest.mark.slow("kills of real servers")
def test_another_process_is_told_who_has_the_directory_and_a_killed_owner_takes_its_server_along(
    tmp_path: Path,
) -> None:
    owner = owner_of(tmp_path)
    try:
        url = said_by(owner)["url"]
        pid = json.loads((tmp_path / "server.json").read_text())["pid"]
        children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        assert children != []
        second = owner_of(tmp_path)
        try:
            told = said_by(second)["error"]
        finally:
            second.kill()
            second.communicate()
        assert f"another server has this directory (pid {pid}, {url})" in told
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert gone_within([pid, *children], 60)


async def test_the_command_line_finds_the_key_of_a_running_server(local_backend: offbook.LocalBackend) -> None:
    model = offbook.TrainableModel("listed", base_model="tiny", backend=local_backend)
    await model.register()
    assert (local_backend.dir / "server.json").stat().st_mode & 0o777 == 0o600
    assert await asyncio.to_thread(list_checkpoints, "listed", None, local_backend.dir) == []


async def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    model = offbook.TrainableModel("agent", base_model="no/such-model", backend=offbook.LocalBackend(tmp_path))
    with pytest.raises(BackendError, match=r"(?s)could not be started \(exit code 2, log .*no/such-model") as caught:
        await model.register()
    assert str(tmp_path / "logs" / "server.log") in str(caught.value)


async def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    backend = offbook.LocalBackend(tmp_path, start_timeout=0.01)
    with pytest.raises(BackendError, match=r"not ready within start_timeout=0.01 s"):
        await backend.connect("tiny")
    with pytest.raises(ConfigError, match="not running yet"):
        await backend.connect()


@pytest.mark.slow("more real servers")
async def test_a_killed_server_is_started_again_with_what_it_had_and_the_time_that_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = offbook.LocalBackend(tmp_path, threads=1)
    model = offbook.TrainableModel("agent", base_model="tiny", backend=backend)
    try:
        await model.overwrite_state({"kept": True})
        facts = json.loads((tmp_path / "server.json").read_text())
        os.kill(facts["pid"], signal.SIGKILL)
        assert await asyncio.to_thread(gone_within, [facts["pid"]], 30)
        with contextlib.suppress(BackendError):  # the kernel may still be taking its threads down
            await model.read_state()
        assert await model.read_state() == {"kept": True}
        assert json.loads((tmp_path / "server.json").read_text())["pid"] != facts["pid"]
        first, second = [line for line in capsys.readouterr().err.splitlines() if "Starting a server" in line]
        assert "tiny, loading it takes longest (log" in first and re.search(r"tiny, [0-9]+ s last time \(log", second)
    finally:
        backend.close()
    assert not (tmp_path / "server.json").exists()
    backend.close()
