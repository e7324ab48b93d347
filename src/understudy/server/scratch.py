"""Removes the unfinished files of a crash from the server's directory. Their names are used for nothing else."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

LEFTOVERS = (
    "*.part",
    "exports/.*",
    "*/models/.fork-*",
    "*/models/*/.*.part",
    "*/models/*/checkpoints/.scratch-*",
    "*/models/*/checkpoints/.deleting-*",
    "jobs/*/*.part",
)
"""Patterns of unfinished forks, exports, checkpoints and files, and of unfinished deletions.

Unfinished exports to folders outside the directory stay, since their paths are not recorded.
"""


def sweep(root: Path) -> int:
    """Delete the leftovers in the directory `root` and return their number. Those that cannot be deleted are logged."""
    swept = 0
    for pattern in LEFTOVERS:
        for path in root.glob(pattern):
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                logger.warning("%s is left over from a crash and cannot be removed: %s", path, error)
                continue
            swept += 1
            logger.info("Removed %s, left over from a crash", path)
    return swept
