"""File permissions of the server's directory: only the server's account may read its prompts, weights and keys."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from offbook.base.errors import ConfigError

logger = logging.getLogger(__name__)

UMASK = 0o077
"""New files get mode 0600, new folders 0700."""
_SECRET = ("key", "records.db", "records.db-wal", "records.db-shm", "server.json", "server.lock")
_OTHERS = 0o077
"""Permissions of the group and of all other accounts."""


def make_private(folder: Path) -> None:
    """Set the umask of this process, and remove the permissions of other accounts from an existing directory.

    Raises ConfigError for a directory that belongs to another account or cannot be written.
    """
    os.umask(UMASK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder, *(folder / name for name in _SECRET if (folder / name).is_file())]
        readable = [path for path in paths if path.stat().st_mode & _OTHERS]
        for path in readable:
            path.chmod(path.stat().st_mode & 0o700)
    except PermissionError as error:
        raise ConfigError(
            f"--dir {folder}: it belongs to another account, so its permissions cannot be restricted ({error}); use that "
            "account, or another --dir"
        ) from error
    except OSError as error:
        raise ConfigError(f"--dir {folder}: cannot be written ({error}); use another folder") from error
    if readable:
        logger.warning("Other accounts of this machine could read %s; now they cannot", ", ".join(map(str, readable)))
