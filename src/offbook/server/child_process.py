"""A child process of the server, in its own process group, with its output in a log file. It dies with the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from offbook.base.child_processes import die_with_parent, ending, last_lines

LOG_LIMIT = 8 * 2**20
"""Size in bytes at which a log is renamed to `.old` when the child starts."""
SPIN_COUNT = 1_000
"""How often a waiting thread of an engine looks for work before it sleeps (GNU's OpenMP, torch's on Linux). With the default
of 300,000, waiting threads keep the cores from the thread that they wait for as soon as another program is busy."""


@dataclass(frozen=True)
class ChildLog:
    """A log file. `start` is the position in bytes where the output of this child begins."""

    path: Path
    start: int

    def tail(self, lines: int = 15) -> str:
        """The last lines of this child, as `last_lines` reads them, or a note in brackets if there are none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self.start, size - 65_536))
                text = file.read().decode("utf-8", "replace")
        except OSError as error:
            return f"(log {self.path} cannot be read: {error})"
        kept = last_lines(text, lines)
        return "\n".join(kept) if kept else f"(nothing in {self.path})"


class Child:
    """A running child process. Create it with `start`; end it with `stop` or `kill`."""

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
        """Start the command `argv`. Its stderr goes to the log, and its stdout too unless `pipes` is set.

        `pipes` connects stdin and stdout to this process, with lines of at most `stdout_limit` bytes. `env` is added
        to the environment of this process, and so is SPIN_COUNT if nothing there says how threads wait. Raises OSError.
        """
        log, file = open_log(log_path)
        with file:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if pipes else file,
                stderr=file,
                limit=stdout_limit,
                start_new_session=True,
                preexec_fn=die_with_parent(),
                env={**_spin_variable(os.environ), **os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.returncode

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """The child's stdin. Only with `pipes`."""
        assert self._process.stdin is not None, "started without pipes"
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """The child's stdout. Only with `pipes`."""
        assert self._process.stdout is not None, "started without pipes"
        return self._process.stdout

    def ending(self) -> str:
        """How the child ended, for a message: `exit code 1` or `signal 9 (SIGKILL)`."""
        return "still running" if self.returncode is None else ending(self.returncode)

    def kill(self) -> None:
        """Send SIGKILL to the process group."""
        self._signal(signal.SIGKILL)

    async def stop(self, deadline: float) -> None:
        """Send SIGTERM to the process group, and SIGKILL if the child still runs after `deadline` seconds."""
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
        """Wait for the exit, then kill what the child left in its process group."""
        await self._process.wait()
        with suppress(ProcessLookupError, PermissionError):  # the group is usually empty
            os.killpg(self.pid, signal.SIGKILL)
        self.exited.set()


def open_log(path: Path) -> tuple[ChildLog, IO[bytes]]:
    """Open a log for appending; rename it first if it is too large. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_LIMIT:
        path.replace(path.with_name(path.name + ".old"))
    file = path.open("ab")
    return ChildLog(path, file.tell()), file


def _spin_variable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that sets SPIN_COUNT; none where `environment` sets how OpenMP's threads wait."""
    return {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(environment) else {"GOMP_SPINCOUNT": str(SPIN_COUNT)}
