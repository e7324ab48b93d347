"""Folders under a lock that the kernel releases when their process ends, even after kill -9: temporary ones, which the next start removes when
their process was killed, and one that one process at a time works in."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from .errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked, so nothing that a kill left is removed
    fcntl = None

logger = logging.getLogger(__name__)

_GLOB = "offbook-*.*"
"""Only folders that are locked while they are in use have a dot in their name."""


class TemporaryFolder:
    """A private folder `offbook-KIND.RANDOM` in the system's temporary directory.

    It is removed by `remove`, at the end of a `with` block, with the object, or at the end of the process. Its process
    holds a lock on it: the first folder of another process removes those of this account that nobody holds, which a kill
    left.
    """

    def __init__(self, kind: str) -> None:
        """Raises OSError."""
        remove_abandoned()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"offbook-{kind}."))
            try:
                lock = locked(self.path)
            except (BlockingIOError, FileNotFoundError):  # another start took it for abandoned before it was locked
                continue
            if self.path.exists():
                break
            _release(lock)
        self.remove = weakref.finalize(self, _remove_locked, self.path, lock)
        """Remove the folder. What cannot be removed is logged. Repeating it does nothing."""

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


_searched: set[str] = set()
"""The temporary directories that this process has searched."""


def remove_abandoned() -> None:
    """Remove the folders of this account whose process has ended; once per process."""
    root = tempfile.gettempdir()
    if root in _searched or fcntl is None:
        return
    _searched.add(root)
    for path in Path(root).glob(_GLOB):
        with suppress(FileNotFoundError, BlockingIOError):  # removed by its process meanwhile, or in use
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                lock = locked(path)
                if lock is not None:
                    _remove_locked(path, lock)


def remove_tree(folder: Path) -> None:
    """Remove a folder with its content, also read-only folders in it. Logs what cannot be removed."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError:
        for place, _, _ in os.walk(folder):
            with suppress(OSError):  # rmtree says it again
                os.chmod(place, 0o700)
        try:
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("the temporary folder %s could not be removed: %s", folder, error)


def _remove_locked(path: Path, lock: int | None) -> None:
    remove_tree(path)
    _release(lock)


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def locked(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where the system has no locks. Raises BlockingIOError if another
    process holds it, and OSError."""
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
            return None
        raise
    return descriptor


HOLDER = "process"
"""File in the folder with the pid of the process that holds it, or did last."""


@contextmanager
def held_folder(folder: Path, option: str) -> Generator[None]:
    """Hold the folder inside the block. Where the system has no locks, a warning says so.

    Raises ConfigError with the pid of another holder, naming the `option` that sets the folder, and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / HOLDER
    try:
        lock = locked(folder.resolve())
    except BlockingIOError as error:
        pid = holder.read_text("utf-8") if holder.exists() else "unknown"
        raise ConfigError(
            f"{option} {folder}: another process works in this folder (pid {pid}): let it end, or name another folder"
        ) from error
    if lock is None:
        logger.warning("%s cannot be locked on this system: run one process on it", folder)
    try:
        holder.write_text(str(os.getpid()), "utf-8")
        yield
    finally:
        if lock is not None:
            os.close(lock)
