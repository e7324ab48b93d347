"""One server per directory: a lock held as long as the process lives, and where the server can be found."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import IO

from ..errors import ConfigError

log = logging.getLogger(__name__)


class DirectoryLock:
    """Holds the folder itself and `{dir}/server.lock`; the kernel lets them go with the process, also after kill -9. The
    lock on the folder stays when somebody deletes the file."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError naming pid and URL of the server that has the directory."""
        self._folder = folder
        self._handle: int | None = None
        self._file: IO[str] = self._acquire()
        self._facts = folder / "server.json"
        self._facts.unlink(missing_ok=True)
        self._note({"pid": os.getpid(), "url": None})

    def announce(self, url: str, base_model: str, key: str | None) -> None:
        """Write `server.json` (0600), by which this account's clients find the server, and its key on loopback."""
        self._note({"pid": os.getpid(), "url": url})
        scratch = self._facts.with_name("server.json.part")
        scratch.unlink(missing_ok=True)
        facts = {"url": url, "pid": os.getpid(), "base_model": base_model, "key": key}
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")
        os.replace(scratch, self._facts)

    def release(self) -> None:
        self._facts.unlink(missing_ok=True)
        self._file.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _acquire(self) -> IO[str]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = (self._folder / "server.lock").open("a+", encoding="utf-8")
            self._handle = os.open(self._folder, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"--dir {self._folder}: cannot be written ({error}); name another folder") from error
        try:
            self._lock_folder(self._handle)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().strip()
            file.close()
            os.close(self._handle)
            raise ConfigError(self._taken(owner)) from error
        return file

    def _lock_folder(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            log.warning(
                "%s cannot be locked itself (%s): only server.lock keeps a second server out", self._folder, error
            )

    def _taken(self, owner: str) -> str:
        try:
            facts = json.loads(owner)
            who = f"pid {facts['pid']}, {facts['url'] or 'still starting'}"
        except (ValueError, KeyError, TypeError):
            who = "it has not said where it listens"
        return (
            f"--dir {self._folder}: another server has this directory ({who}). "
            "Use that one, end it, or give this one another --dir"
        )

    def _note(self, facts: dict[str, int | str | None]) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(facts))
        self._file.flush()
