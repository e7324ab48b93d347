"""Running one program in a session of its own: its limit, its output, its end, and the end of all that it started."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offbook.base.child_processes import ending
from offbook.base.errors import RolloutError

GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL when a program is stopped."""
KEPT_BYTES = 32 * 2**10
"""Bytes that are kept of the beginning, and again of the end, of a program's stdout and stderr each."""
_DRAIN_SECONDS = 1.0  # for the rest of the output, once all processes have ended
_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_REWARD_LINE = re.compile(rb"^reward:[ \t]*(\S+)[ \t]*\r?$", re.MULTILINE)
_LONGEST_LINE = 200  # bytes of a line `reward: x`


@dataclass
class ProgramOutput:
    """What a program wrote to stdout or stderr: bounded, however much it writes. `reward`: the value of its last whole line
    `reward: x`, as text; None without one."""

    size: int = 0
    reward: str | None = None
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)
    _line: bytes = b""

    def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.size += len(chunk)
        room = KEPT_BYTES - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:] if room > 0 else chunk
        del self._tail[:-KEPT_BYTES]
        text = self._line + chunk
        whole, newline, rest = text.rpartition(b"\n")
        if newline:
            self._find(whole)
        self._line = rest if newline else text
        if len(self._line) > _LONGEST_LINE:
            self._line = (
                b"-" + self._line[-_LONGEST_LINE:]
            )  # too long for a reward, and so is what follows in this line

    def end(self) -> None:
        """Take the last line, which may have no newline."""
        self._find(self._line)

    def text(self) -> str:
        """The output, or its beginning and end with the number of bytes left out between them."""
        left_out = self.size - len(self._head) - len(self._tail)
        between = f"\n[... {left_out:,} bytes left out ...]\n".encode() if left_out else b""
        return (bytes(self._head) + between + bytes(self._tail)).decode("utf-8", "replace")

    def _find(self, lines: bytes) -> None:
        if rewards := _REWARD_LINE.findall(lines):
            self.reward = rewards[-1].decode("utf-8", "replace")


@dataclass(frozen=True)
class Ending:
    """How a program ended. `code`: its exit code, negative for the signal that ended it. `timed_out`: it was stopped."""

    code: int
    timed_out: bool
    stdout: ProgramOutput
    stderr: ProgramOutput

    def __str__(self) -> str:
        return ending(self.code)


async def run_program(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: bytes | None = b"",
    timeout: float | None = None,
    captured: bool = True,
) -> Ending:
    """Run a program to its end, in a session of its own, and return when no process that it started is left.

    `stdin`: what it reads there; None: this process's own. `timeout`: seconds after which it is stopped. Without
    `captured`, its output goes where this process's goes. If this is cancelled, or this process is killed, the program is
    ended too. Raises RolloutError for a program that cannot be started, or whose supervisor was killed.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    pipe = asyncio.subprocess.PIPE if captured else None
    with ours:
        with theirs:
            try:
                supervisor = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", _SUPERVISOR, str(theirs.fileno()), str(GRACE_SECONDS), *argv),
                    stdin=None if stdin is None else asyncio.subprocess.PIPE,
                    stdout=pipe,
                    stderr=pipe,
                    env=env,
                    cwd=cwd,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
                raise RolloutError(f"{argv[0]!r:.200} could not be started: {error}") from error
        return await _Run(ours, supervisor, argv[0]).until_end(stdin, timeout)


class _Run:
    """A program that runs below its supervisor."""

    def __init__(self, control: socket.socket, supervisor: asyncio.subprocess.Process, name: str) -> None:
        self._control = control
        self._supervisor = supervisor
        self._name = name
        self._stdout, self._stderr = ProgramOutput(), ProgramOutput()

    async def until_end(self, stdin: bytes | None, timeout: float | None) -> Ending:
        streams = [
            asyncio.create_task(_kept(reader, output))
            for reader, output in ((self._supervisor.stdout, self._stdout), (self._supervisor.stderr, self._stderr))
            if reader is not None
        ]
        if stdin is not None:
            streams.append(asyncio.create_task(self._feed(stdin)))
        report, timed_out = asyncio.create_task(self._report()), False
        try:
            done, _ = await asyncio.wait([report], timeout=timeout)
            timed_out = not done
            if timed_out:
                self._control.shutdown(socket.SHUT_WR)
            code = await report
            await asyncio.wait(streams, timeout=_DRAIN_SECONDS) if streams else None
        finally:
            with suppress(OSError):  # it has ended
                self._control.shutdown(socket.SHUT_WR)
            for stream in streams:
                stream.cancel()
            await asyncio.shield(asyncio.gather(report, return_exceptions=True))
            await self._supervisor.wait()
            # A process that outlived a killed supervisor for a moment holds the pipes; asyncio has no public way to close them.
            self._supervisor._transport.close()  # type: ignore[attr-defined]
        self._stdout.end()
        return Ending(code, timed_out, self._stdout, self._stderr)

    async def _report(self) -> int:
        loop, text = asyncio.get_running_loop(), b""
        while chunk := await loop.sock_recv(self._control, 4096):
            text += chunk
        answer: dict[str, int | str] = {}
        for line in text.split(b"\n"):
            answer |= json.loads(line or "{}")
        if "error" in answer:
            raise RolloutError(f"{self._name!r:.200} could not be started: {answer['error']}")
        if "code" not in answer:
            if "pid" in answer:
                with suppress(ProcessLookupError, PermissionError):  # the group has ended
                    os.killpg(int(answer["pid"]), signal.SIGKILL)
            raise RolloutError(f"{self._name!r:.200}: its supervisor was killed, so how it ended is not known")
        return int(answer["code"])

    async def _feed(self, stdin: bytes) -> None:
        writer = self._supervisor.stdin
        assert writer is not None, "started with a pipe"
        with suppress(BrokenPipeError, ConnectionResetError):  # a program may leave its input unread
            writer.write(stdin)
            await writer.drain()
        writer.close()


async def _kept(reader: asyncio.StreamReader, output: ProgramOutput) -> None:
    while chunk := await reader.read(2**16):
        output.add(chunk)
