"""Child processes: why one ended, read from the end of its output, and how one dies with the process that started it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator

_NOISE = re.compile(
    r"nanobind: |See https://nanobind\.|\s*- leaked |\s*- \.\.\. skipped remainder|.*resource_tracker: |"
    r".*destroy_process_group\(\)|Extension modules: |sys:1: \w+Warning: "
)
"""Lines that libraries write while a process ends, whatever ended it."""
_RANK = re.compile(r"\[rank\d+\]: ?")
"""torch's prefix of a process's traceback."""
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_IGNORED = "Exception ignored in"


def last_lines(text: str, count: int) -> list[str]:
    """The last non-empty lines of an output without what libraries write at the end of a process. The exception that ended
    it is among them: where more came after it, it is the first."""
    lines = list(_kept(text))
    exception, last = _exception(lines), lines[-count:]
    return last if exception is None or exception in last else [exception, *last[1:]]


def last_line(text: str) -> str:
    """The exception that ended a process, else its last line; empty without one.

    >>> last_line("Traceback (most recent call last):\\n  File 'x.py', line 1\\nTypeError: no\\nnanobind: leaked 2 types!\\n")
    'TypeError: no'
    """
    lines = list(_kept(text))
    return _exception(lines) or (lines[-1] if lines else "")


def _kept(text: str) -> Iterator[str]:
    """The lines without noise, empty ones and exceptions that Python ignored, each with its traceback."""
    ignored = False
    for line in text.split("\n"):
        if line.startswith(_IGNORED):
            ignored = True
        elif ignored and line.startswith((_TRACEBACK, " ")):
            continue
        elif ignored:
            ignored = False  # the ignored exception itself
        elif line.strip() and not _NOISE.match(line):
            yield line


def _exception(lines: list[str]) -> str | None:
    """The line of the last exception with a traceback, or of a fatal error; None if there is none."""
    exception: str | None = None
    in_traceback = False
    for line in lines:
        plain = _RANK.sub("", line, count=1)
        if plain.startswith(_TRACEBACK):
            in_traceback = True
        elif plain.startswith(_FATAL) or (in_traceback and not plain.startswith(" ")):
            exception, in_traceback = line, False
    return exception


_PR_SET_PDEATHSIG = 1
"""The option of prctl(2)."""


def ending(code: int) -> str:
    """How a process ended, by its return code, for a message: `exit code 1` or `signal 9 (SIGKILL)`."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"


def die_with_parent() -> Callable[[], None] | None:
    """A function for the child to call before exec, so that the kernel kills it when this process dies. Linux only.

    Elsewhere returns None: the sampler watches --parent-pid there, and the learner the end of its stdin.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return before_exec
