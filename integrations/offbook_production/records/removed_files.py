"""Deletes what files of a server's directory have of trajectories that are removed."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from offbook.base.errors import EngineError
from offbook.engine import token_file
from offbook.engine.checkpoint_files import write_bytes

logger = logging.getLogger(__name__)


def remove_from_files(root: Path, ids: Collection[str]) -> int:
    """Delete the token files and the jobs that have one of these trajectories, and their lines in JSON Lines files, such as those
    of a trace sink. Returns the number of files and jobs that were changed or deleted. Blocks. Raises OSError."""
    changed = 0
    for folder in root.glob("*/models/*/tokens"):
        for path in token_file.files(folder):
            if _has_tokens(path, ids):
                path.unlink(missing_ok=True)
                changed += 1
    marks = {json.dumps(name, ensure_ascii=plain).encode() for name in ids for plain in (True, False)}
    for job in root.glob("jobs/*/job.json"):
        if _names(job.read_bytes(), marks):
            shutil.rmtree(job.parent)
            changed += 1
    for path in root.rglob("*.jsonl"):
        lines = path.read_bytes().split(b"\n")
        kept = [line for line in lines if not _names(line, marks)]
        if len(kept) < len(lines):
            write_bytes(path, b"\n".join(kept))
            changed += 1
    return changed


def _has_tokens(path: Path, ids: Collection[str]) -> bool:
    """Whether a token file has a trajectory. One that cannot be read may have it."""
    try:
        return any(call.trajectory in ids for call in token_file.read_head(path).calls)
    except FileNotFoundError:
        return False
    except EngineError as error:
        logger.warning("%s. It is deleted with the removed trajectories", error)
        return True


def _names(text: bytes, marks: Collection[bytes]) -> bool:
    """Whether JSON has one of these strings."""
    return any(mark in text for mark in marks)
