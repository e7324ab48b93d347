"""Lets a child process die with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
"""The option of prctl(2)."""


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
