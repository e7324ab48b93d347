"""What a crash leaves half made in a directory, removed at the next start: each has a name that nothing else has."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

LEFTOVERS = (
    "*.part",
    "exports/.*",
    "*/models/.fork-*",
    "*/models/*/.*.part",
    "*/models/*/checkpoints/.scratch-*",
    "*/models/*/checkpoints/.deleting-*",
    "jobs/*/*.part",
)
"""Forks, exports, checkpoints and files that were being written, or removed. Exports to folders of the user's own choice
are not known after a restart."""


def sweep(root: Path) -> int:
    """Remove them; how many there were. What cannot be removed stays, and is named in the log."""
    swept = 0
    for pattern in LEFTOVERS:
        for path in root.glob(pattern):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                log.warning("%s was left by a crash and cannot be removed: %s", path, error)
                continue
            swept += 1
            log.info("Removed %s, which a crash left half made", path)
    return swept
