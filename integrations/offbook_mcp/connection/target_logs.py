"""Keeps the log records of a server object in this process in a file. The SDK sends them to the terminal, several a call."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from offbook.base.server_options import default_dir
from offbook.base.terminal import echo

from .servers import InProcessServer
from .target import Target

_LARGEST = 2**22
"""Bytes of the file, of which one earlier part is kept."""
_LINE = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class TargetLog(RotatingFileHandler):
    """The file; it and its folder are made with the first record."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=_LARGEST, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(_LINE)

    def _open(self) -> io.TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    @property
    def used(self) -> bool:
        """Whether a record was written."""
        return self.stream is not None  # pyright: ignore[reportUnnecessaryComparison]  # None until the first record


@contextmanager
def logs_of_command(file: Path | None) -> Generator[None]:
    """Inside the block, all log records of this process go to `file` (None: nowhere), and Offbook's warnings to stderr.

    Enter it before the server's module is imported: the SDK configures logging only if nobody else has. Says at the end
    where the records are.
    """
    root, own = logging.getLogger(), logging.getLogger("offbook")
    log = logging.NullHandler() if file is None else TargetLog(file)
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setLevel(logging.WARNING)
    level = root.level
    root.addHandler(log)
    own.addHandler(warnings)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(log)
        own.removeHandler(warnings)
        if isinstance(log, TargetLog) and log.used:
            echo(f"log records are in {log.baseFilename}", err=True)
        log.close()


@contextmanager
def logs_of_target(target: Target) -> Generator[None]:
    """Inside the block, the SDK's log records go to `logs/mcp.log` in the default directory if a server of the target is an
    object in this process and somebody has configured logging, as the SDK itself does with each server object."""
    configured = any(not isinstance(handler, logging.NullHandler) for handler in logging.getLogger().handlers)
    kept = any(isinstance(handler, TargetLog) for handler in logging.getLogger().handlers)
    if kept or not configured or not any(isinstance(server, InProcessServer) for server in target.servers):
        yield
        return
    sdk = logging.getLogger("mcp")
    log, propagates = TargetLog(default_dir() / "logs" / "mcp.log"), sdk.propagate
    sdk.addHandler(log)
    sdk.propagate = False
    try:
        yield
    finally:
        sdk.propagate = propagates
        sdk.removeHandler(log)
        log.close()
