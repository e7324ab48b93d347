"""Files that only the server's account may read: prompts, weights and keys lie in the directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..errors import ConfigError

log = logging.getLogger(__name__)

UMASK = 0o077
_SECRET = ("key", "records.db", "records.db-wal", "records.db-shm", "server.json", "server.lock")
_OTHERS = 0o077


def make_private(folder: Path) -> None:
    """Files are made for this account only from now on (0600, folders 0700), and the directory of before is closed to
    others. Raises ConfigError for a directory of another account."""
    os.umask(UMASK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder, *(folder / name for name in _SECRET if (folder / name).is_file())]
        opened = [path for path in paths if path.stat().st_mode & _OTHERS]
        for path in opened:
            path.chmod(path.stat().st_mode & 0o700)
    except PermissionError as error:
        raise ConfigError(
            f"--dir {folder}: it belongs to another account, so it cannot be closed to others ({error}); use that "
            "account, or another --dir"
        ) from error
    except OSError as error:
        raise ConfigError(f"--dir {folder}: cannot be written ({error}); name another folder") from error
    if opened:
        log.warning("Other accounts of this machine could read %s; they cannot any more", ", ".join(map(str, opened)))
