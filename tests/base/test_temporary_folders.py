"""What a kill leaves in the system's temporary directory, and what the next start removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import psutil
import pytest

from tests.mcp_adapter.conftest import SERVERS
from tests.server.servers import RunningServer, until
from tests.server.test_faults import ended

_USER = """
import sys
from offbook.base.locked_folders import TemporaryFolder
folders = [TemporaryFolder("rollout") for _ in range(3)]
for folder in folders:
    (folder.path / "read-only").mkdir()
    (folder.path / "read-only" / "file").write_text("text")
    (folder.path / "read-only").chmod(0o500)
print("ready", flush=True)
sys.stdin.read()
"""

_ROLLOUT = """
import asyncio, sys
from pathlib import Path
from offbook_mcp import ServerPool, StdioServer, Target

async def main():
    server = StdioServer("odd", sys.executable, ("-I", "-S", sys.argv[1], "stubborn", "{rollout_dir}"))
    async with ServerPool(Target((server,), fixture=Path(sys.argv[2]))) as pool, pool.rollout():
        print("ready", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@contextmanager
def user_of(temporary: Path) -> Generator[subprocess.Popen[str]]:
    """A process that holds three temporary folders, and ends with its stdin."""
    with subprocess.Popen(
        [sys.executable, "-c", _USER],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


def test_folders_that_a_kill_left_are_removed_by_the_next_start_and_those_in_use_are_kept(tmp_path: Path) -> None:
    foreign = [tmp_path / "offbook-notes", tmp_path / "other.folder"]
    for folder in foreign:
        folder.mkdir()
    (tmp_path / "offbook-link.x").symlink_to(foreign[0])
    (foreign[0] / "file").touch()
    with user_of(tmp_path) as killed, user_of(tmp_path):
        assert len(list(tmp_path.glob("offbook-rollout.*"))) == 6
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with user_of(tmp_path):
            assert len(list(tmp_path.glob("offbook-rollout.*"))) == 6  # of two processes; the killed one's are gone
    assert sorted(tmp_path.iterdir()) == sorted([*foreign, tmp_path / "offbook-link.x"])
    assert (foreign[0] / "file").exists()


@pytest.mark.slow("kills of real servers")
def test_a_killed_server_learner_and_rollout_leave_no_folders_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    fixture = tmp_path / "fixture"
    fixture.mkdir()
    (fixture / "file").touch()
    temporary = Path(mkdtemp(prefix="kills."))  # tmp_path is too long for the path of a socket
    request.addfinalizer(lambda: rmtree(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = [sys.executable, "-c", _ROLLOUT, str(SERVERS / "misbehaving.py"), str(fixture)]
    with (
        RunningServer(tmp_path / "dir") as server,
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as rollout,
    ):
        try:
            assert rollout.stdout is not None and rollout.stdout.readline() == "ready\n"
            assert server.train("step", [server.rollouts(2, "rollout")])[-1]["result"]["step"] == 1
            learner = server.child("engine.learner")
            below = [each for pid in (rollout.pid, server.process.pid) for each in psutil.Process(pid).children(True)]
            assert list(temporary.glob("offbook-mcp.*/*/file")) and list(temporary.glob("offbook-sampler.*"))
        finally:
            rollout.kill()
        learner.kill()
        server.kill()
    until(lambda: all(ended(each) for each in below), "the children have ended with them")
    assert len(list(temporary.glob("offbook-*"))) == 2
    with RunningServer(tmp_path / "dir", "--inference-only") as server:
        server.interrupt()
        assert server.process.wait(60) == 0
    left = [path.name for path in temporary.iterdir()]
    assert all(name.startswith("torchinductor_") for name in left), left  # torch's cache, one for all processes
