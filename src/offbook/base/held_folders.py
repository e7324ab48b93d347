"""A folder that one process at a time works in, by a lock that the kernel releases when the process ends, even after kill -9."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError
from .temporary_folders import locked

logger = logging.getLogger("offbook")

HOLDER = "process"
"""File in the folder with the pid of the process that holds it, or did last."""


@contextmanager
def held_folder(folder: Path, option: str) -> Generator[None]:
    """Hold the folder inside the block. Where the system has no locks, a warning says so.

    Raises ConfigError with the pid of another holder, naming the `option` that sets the folder, and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / HOLDER
    try:
        lock = locked(folder.resolve())
    except BlockingIOError as error:
        pid = holder.read_text("utf-8") if holder.exists() else "unknown"
        raise ConfigError(
            f"{option} {folder}: another process works in this folder (pid {pid}): let it end, or name another folder"
        ) from error
    if lock is None:
        logger.warning("%s cannot be locked on this system: run one process on it", folder)
    try:
        holder.write_text(str(os.getpid()), "utf-8")
        yield
    finally:
        if lock is not None:
            os.close(lock)
