"""Keys from a file that is read again when it changes, for key rotation: add a new key, move clients, remove the old."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class KeyFile:
    """A file with one key per line. Empty lines and lines that begin with # are ignored.

    The file is checked for changes at most once per LOOK_SECONDS.
    """

    def __init__(self, path: Path, first: str) -> None:
        """`first` is the valid key until the file can be read."""
        self._path = path
        self._keys = frozenset({first.encode()})
        self._seen: tuple[int, int] | None = None
        self._next = 0.0

    def keys(self) -> frozenset[bytes]:
        """The valid keys. While the file is missing or empty, the previous keys stay valid and an error is logged."""
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
                logger.error("The keys of %s stay as they were, the file cannot be read: %s", self._path, error)
            self._seen = (0, 0)
            return
        keys = frozenset(line.encode() for line in lines if line and not line.startswith("#"))
        if not keys:
            logger.error("The keys of %s stay as they were: no key is in the file", self._path)
        elif keys != self._keys:
            logger.info("%d keys of %s are in force", len(keys), self._path)
            self._keys = keys
        self._seen = seen
