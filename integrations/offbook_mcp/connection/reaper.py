"""Ends servers when this process is gone, even by SIGKILL: a small watching process kills their process groups."""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress

logger = logging.getLogger("offbook")


class Reaper:
    """Tells the watching process which process groups must end with this process. One per process, POSIX only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def add(self, group: int) -> None:
        """Watch a process group."""
        with self._lock:
            if self._owner != os.getpid():  # first use, or after a fork: the groups belong to the parent process
                self._groups, self._process, self._owner = set(), None, os.getpid()
                atexit.register(self._close)
            self._groups.add(group)
            if not self._sent(f"+{group}\n"):
                self._start()

    def remove(self, group: int) -> None:
        """Kill what is left of a process group, and stop watching it."""
        with suppress(ProcessLookupError, PermissionError):  # usually empty by now; macOS returns EPERM for a zombie
            os.killpg(group, signal.SIGKILL)
        with self._lock:
            self._groups.discard(group)
            self._sent(f"-{group}\n")

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            logger.warning(
                "MCP servers could outlive this process if it is killed: the watching process did not start (%s)", error
            )
            return
        self._sent("".join(f"+{group}\n" for group in self._groups))

    def _sent(self, line: str) -> bool:
        """Send a line to the watching process. False if there is none."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:  # it was killed
            self._close()
            return False
        return True

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and self._owner == os.getpid():
            with suppress(OSError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(2.0)


def _watch(parent: int) -> None:
    """The watching process, which reads `+GROUP` and `-GROUP` lines. Watch until `parent` ends or closes stdin, then kill the remaining process groups."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    rest = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue


if __name__ == "__main__":
    _watch(int(sys.argv[1]))

reaper = Reaper()
