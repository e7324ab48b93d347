"""Runs one program and ends all that it started. A process of its own, so that it outlives a killed trainer.

`python -I -S supervisor.py FD GRACE PROGRAM ARGUMENT...`: FD is one end of a socket. The program ends when it exits by
itself, or when the other end of the socket is closed or shut down. Then its process group gets SIGTERM, after GRACE seconds
SIGKILL, and so does every descendant, also in other sessions. Lines of JSON are written to
the socket: `{"pid": 12}` at the start, `{"code": 0}` (negative: a signal) when none is left, or only `{"error": "..."}` for
a program that cannot start. Only the standard library is
imported, and nothing of this package: a rollout waits for this start.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILLING_SECONDS = 10.0
"""How long descendants are killed before those that do not die (of another user, in uninterruptible I/O) are left."""


def main() -> None:
    """Run the program named on the command line."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    wakeups = _wakeups()
    prctl = _prctl()
    if prctl is not None:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        program = subprocess.Popen(sys.argv[3:], start_new_session=True, preexec_fn=_dying_with_parent(prctl))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _report(control, {"error": f"{type(error).__name__}: {error}"})
        return
    _report(control, {"pid": program.pid})
    _close_inherited()
    reaped = _Reaped(program.pid)
    stopped = _watch(control, wakeups, reaped)
    if stopped:
        _signal_group(program.pid, signal.SIGTERM)
        deadline = time.monotonic() + float(sys.argv[2])
        while reaped.code is None and (left := deadline - time.monotonic()) > 0:
            select.select([wakeups], [], [], left)
            _drain(wakeups)
            reaped.reap()
    _kill_all(program.pid, reaped)
    _report(control, {"code": reaped.code if reaped.code is not None else -signal.SIGKILL})


def _prctl() -> Callable[..., int] | None:
    """prctl(2); None where it does not exist."""
    return ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class _Reaped:
    """Collects the exits of children. `code`: the program's, None while it runs. `none_left`: no child exists."""

    def __init__(self, program: int) -> None:
        self._program = program
        self.code: int | None = None
        self.none_left = False

    def reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._program:
                    self.code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            self.none_left = True


def _noted(number: int, frame: object) -> None:
    """A handler that leaves the signal to the wakeup socket."""


def _wakeups() -> socket.socket:
    """A socket that becomes readable on SIGCHLD and SIGTERM."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _noted)
    return reader


def _dying_with_parent(prctl: Callable[..., int] | None) -> Callable[[], None] | None:
    """A function for the child before exec: the kernel kills the program when its supervisor is killed. Linux only."""
    if prctl is None:
        return None
    parent = os.getpid()

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def _close_inherited() -> None:
    """Give up the program's streams: their ends are the ends of the program and what it started."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


def _watch(control: socket.socket, wakeups: socket.socket, reaped: _Reaped) -> bool:
    """Wait until the program has ended, or is to be stopped (True)."""
    while True:
        reaped.reap()
        if reaped.code is not None:
            return False
        readable, _, _ = select.select([control, wakeups], [], [])
        if control in readable or signal.SIGTERM in _drain(wakeups):
            return True


def _drain(wakeups: socket.socket) -> bytes:
    """The numbers of the signals that arrived."""
    try:
        return wakeups.recv(4096)
    except BlockingIOError:
        return b""


def _kill_all(group: int, reaped: _Reaped) -> None:
    """Kill every descendant, again and again until none is left: one may fork while another is killed."""
    deadline = time.monotonic() + KILLING_SECONDS
    _signal_group(group, signal.SIGKILL)
    reaped.reap()
    while not reaped.none_left and time.monotonic() < deadline:
        for pid in _descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it has ended, or belongs to another user
        time.sleep(0.002)
        reaped.reap()


def _descendants() -> list[int]:
    """Ids of this process's descendants, by /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in filter(str.isdigit, names):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it ended while the list was read
        children.setdefault(parent, []).append(int(name))
    descendants, waiting = list[int](), [os.getpid()]
    while waiting:
        own = children.get(waiting.pop(), [])
        descendants += own
        waiting += own
    return descendants


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return  # the group is empty; macOS answers with the second


def _report(control: socket.socket, answer: dict[str, int | str]) -> None:
    try:
        control.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:
        return  # the trainer has died: nobody reads it


if __name__ == "__main__":
    main()
