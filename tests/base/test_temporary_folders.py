"""What a kill leaves in the system's temporary directory, and what the next start removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_USER = """
import sys
from offbook.base.temporary_folders import TemporaryFolder
folders = [TemporaryFolder("rollout") for _ in range(3)]
for folder in folders:
    (folder.path / "read-only").mkdir()
    (folder.path / "read-only" / "file").write_text("text")
    (folder.path / "read-only").chmod(0o500)
print("ready", flush=True)
sys.stdin.read()
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
