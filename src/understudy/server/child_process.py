"""A child process of the server: its own process group, its output in a log file, dead when the server is."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LOG_LIMIT = 8 * 2**20
"""Bytes after which a log is put aside as `.old` at the next start."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildLog:
    """A log file, and where in it this run of the child began."""

    path: Path
    start: int

    def tail(self, lines: int = 15) -> str:
        """The last lines that this run wrote; a line saying so when there are none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self.start, size - 65_536))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return f"(log {self.path} cannot be read: {error})"
        kept = [line for line in text.splitlines() if line.strip()][-lines:]
        return "\n".join(kept) if kept else f"(nothing in {self.path})"


class Child:
    """A running child. Made by `start`; always ended by `stop` or `kill`."""

    def __init__(self, process: asyncio.subprocess.Process, log: ChildLog) -> None:
        self._process = process
        self.log = log
        self.exited = asyncio.Event()
        self._watch = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        log_path: Path,
        *,
        pipes: bool = False,
        stdout_limit: int = 16 * 2**20,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `argv`; stderr (and stdout, unless `pipes`) goes to the log. `env` is added to this process's own.
        Raises OSError."""
        log, file = _open_log(log_path)
        with file:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if pipes else file,
                stderr=file,
                limit=stdout_limit,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    @property
    def stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None, "started without pipes"
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None, "started without pipes"
        return self._process.stdout

    def ending(self) -> str:
        """How it ended, in words: `exit code 1` or `signal 9 (SIGKILL)`."""
        code = self.returncode
        if code is None:
            return "still running"
        if code < 0:
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"exit code {code}"

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        self._signal(signal.SIGKILL)

    async def stop(self, deadline: float) -> None:
        """SIGTERM, and SIGKILL to the group after `deadline` seconds."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.exited.wait(), deadline)
        except TimeoutError:
            self.kill()
            await self.exited.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return  # it ended between the check and the signal

    async def _wait(self) -> None:
        await self._process.wait()
        with suppress(ProcessLookupError, PermissionError):  # mostly nobody is left
            os.killpg(self.pid, signal.SIGKILL)
        self.exited.set()


def _open_log(path: Path) -> tuple[ChildLog, IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_LIMIT:
        path.replace(path.with_name(path.name + ".old"))
    file = path.open("ab")
    return ChildLog(path, file.tell()), file


def _die_with_parent():
    """On Linux, a function run in the child before exec: SIGKILL when the server dies, however it dies.
    Elsewhere None: the sampler watches --parent-pid, the learner the end of its stdin."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask
