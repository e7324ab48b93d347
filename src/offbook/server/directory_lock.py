"""Takes a server's directory: only its account reads prompts, weights and keys there, one server at a time locks it, what a
crash left is deleted, `server.json` tells clients on this machine where the server is, and all prompts have one date."""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import os
import shutil
from io import FileIO
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.server_options import ServerOptions
from offbook.base.types import Json

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
        raise unwritable(folder, error) from error
    if readable:
        logger.warning("Other accounts of this machine could read %s; now they cannot", ", ".join(map(str, readable)))


def unwritable(folder: Path, error: OSError) -> ConfigError:
    """The error of a server whose directory cannot be written: a full disk, another account's, a failing disk."""
    return ConfigError(f"--dir {folder}: cannot be written ({error}); free space there, or use another folder")


class DirectoryLock:
    """Allows one server per directory, by locks on the folder itself and on `{dir}/server.lock`.

    The kernel releases them when the process ends, even after kill -9. The lock on the folder works even if somebody
    deletes the file.
    """

    def __init__(self, folder: Path) -> None:
        """Take the locks. Raises ConfigError with pid and URL of the server that holds them, or if nothing can be written."""
        self._folder = folder
        self._handle: int | None = None
        self._file: FileIO = self._acquire()
        self._facts = folder / "server.json"
        try:
            self._facts.unlink(missing_ok=True)
            self._write_owner({"pid": os.getpid(), "url": None})
        except OSError as error:
            self._unlock()
            raise unwritable(folder, error) from error

    def announce(self, url: str, base_model: str, key: str | None) -> None:
        """Write `server.json` with mode 0600, by which clients of this account find the server.

        `key`: the server's key, if clients may read it there. Raises ConfigError if it cannot be written.
        """
        scratch = self._facts.with_name("server.json.part")
        facts = {"url": url, "pid": os.getpid(), "base_model": base_model, "key": key}
        try:
            self._write_owner({"pid": os.getpid(), "url": url})
            scratch.unlink(missing_ok=True)
            with os.fdopen(
                os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
            ) as file:
                file.write(json.dumps(facts) + "\n")
            os.replace(scratch, self._facts)
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def release(self) -> None:
        """Release the locks and remove server.json."""
        self._facts.unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        self._file.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _acquire(self) -> FileIO:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = (self._folder / "server.lock").open("a+b", buffering=0)
            self._handle = os.open(self._folder, os.O_RDONLY)
        except OSError as error:
            raise unwritable(self._folder, error) from error
        try:
            self._lock_folder(self._handle)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            owner = file.read().decode("utf-8", "replace").strip()
            file.close()
            os.close(self._handle)
            raise ConfigError(self._taken(owner)) from error
        return file

    def _lock_folder(self, handle: int) -> None:
        """Lock the folder; only warn if its file system cannot. Raises BlockingIOError if it is locked."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            logger.warning(
                "The folder %s cannot be locked (%s): only server.lock prevents a second server", self._folder, error
            )

    def _taken(self, owner: str) -> str:
        try:
            facts = json.loads(owner)
            who = f"pid {facts['pid']}, {facts['url'] or 'still starting'}"
        except (ValueError, KeyError, TypeError):
            who = "its pid and address are unknown"
        return (
            f"--dir {self._folder}: another server has this directory ({who}). "
            "Use that server (commands find it by OFFBOOK_URL), stop it, or start this one with another --dir"
        )

    def _write_owner(self, facts: dict[str, int | str | None]) -> None:
        self._file.truncate(0)
        self._file.write(json.dumps(facts).encode())


def address_of_server(folder: Path) -> str | None:
    """The URL of the server of this machine that runs on a directory; None if none does. `server.json` names it, and a killed
    server leaves that file, so its process must live."""
    try:
        facts: Json = read_json(folder / "server.json")
        os.kill(facts["pid"], 0)
        return str(facts["url"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


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


PROMPT_DATE = "prompt_date"
"""The file with the date that chat templates write into prompts: one for all of a directory, whatever the day and after a restart."""


def with_prompt_date(options: ServerOptions) -> ServerOptions:
    """The options with the date that they name, else the one recorded in the directory, else today's, and record it.

    Raises ConfigError for a damaged record.
    """
    file = options.dir / PROMPT_DATE
    recorded = _recorded(file)
    date = options.engine.prompt_date or recorded or datetime.date.today()
    if recorded is not None and date != recorded:
        logger.warning("Prompts had the date %s until now, and have %s from now on (--prompt-date)", recorded, date)
    if date != recorded:
        file.write_text(f"{date}\n", encoding="utf-8")
    return options.model_copy(update={"engine": options.engine.model_copy(update={"prompt_date": date})})


def _recorded(file: Path) -> datetime.date | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
        return datetime.date.fromisoformat(text)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{file} holds no date: write one such as 2026-11-29, the date of its prompts") from error
