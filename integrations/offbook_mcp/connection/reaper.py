"""Ends servers when this process is gone, even by SIGKILL: a small watching process kills their process groups."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("offbook")

_SCRIPT = Path(__file__).with_name("reaper_process.py")


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
                [sys.executable, "-I", "-S", str(_SCRIPT), str(os.getpid())],
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


reaper = Reaper()
