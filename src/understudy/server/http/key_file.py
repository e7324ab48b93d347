"""The kept keys, read again when their file changes: a new key is added, clients move to it, the old line is removed."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class KeyFile:
    """One key on each line; empty lines and those that begin with # are passed over. Checked once in LOOK_SECONDS."""

    def __init__(self, path: Path, first: str) -> None:
        """`first` is in force until the file can be read."""
        self._path = path
        self._keys = frozenset({first.encode()})
        self._seen: tuple[int, int] | None = None
        self._next = 0.0

    def keys(self) -> frozenset[bytes]:
        """The keys in force. A file that is gone or empty leaves those of before in force, and is named in the log."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOOK_SECONDS
            self._look()
        return self._keys

    def _look(self) -> None:
        try:
            facts = os.stat(self._path)
            seen = (facts.st_mtime_ns, facts.st_ino)
            if seen == self._seen:
                return
            lines = [line.strip() for line in self._path.read_text("ascii").splitlines()]
        except (OSError, ValueError) as error:
            if self._seen != (0, 0):
                log.error("The keys of %s stay as they were, the file cannot be read: %s", self._path, error)
            self._seen = (0, 0)
            return
        keys = frozenset(line.encode() for line in lines if line and not line.startswith("#"))
        if not keys:
            log.error("The keys of %s stay as they were: no key is in the file", self._path)
        elif keys != self._keys:
            log.info("%d keys of %s are in force", len(keys), self._path)
            self._keys = keys
        self._seen = seen
