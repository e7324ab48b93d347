"""Checks, repairs and copies a server's directory."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from offbook.base.errors import ConfigError, EngineError, StoreError
from offbook.base.terminal import echo
from offbook.base.wire import ArchiveState, UserState

from ..engine import checkpoint_files
from ..engine.checkpoint_files import put_aside, sync
from .directory_lock import PROMPT_DATE, UMASK, DirectoryLock
from .models import checkpoints
from .records.database import RECORDS, fault_of

_NOT_WHOLE = 1
"""Exit code for a directory or a copy with parts that are damaged or could not be checked."""


@dataclass(frozen=True)
class DirectoryPart:
    """A file or folder that `verify` checks. `fault`: what is damaged; `unchecked`: why it could not be read, so that
    nothing is known of it. Both are None if it is whole."""

    path: Path
    fault: str | None = None
    unchecked: str | None = None


def verify(root: Path, *, repair: bool) -> int:
    """Check all parts of the directory `root`, print those that are not whole, and return the exit code.

    `repair` renames damaged parts, never those that could not be checked. Raises ConfigError while a server runs on the directory, StoreError if a repair fails.
    """
    lock = DirectoryLock(root)
    damaged = unchecked = whole = 0
    try:
        for part in parts(root):
            damaged += part.fault is not None
            unchecked += part.unchecked is not None
            whole += part.fault is None and part.unchecked is None
            _print(part)
            if part.fault is not None and repair:
                echo(f"  {_repaired(part.path)}")
    except OSError as error:
        raise StoreError(f"{root} could not be checked or repaired: {error}") from error
    finally:
        lock.release()
    echo(
        f"{whole} parts are whole, {damaged} damaged{' and put aside' if damaged and repair else ''}"
        + (f", {unchecked} could not be checked" if unchecked else "")
    )
    return _NOT_WHOLE if unchecked or (damaged and not repair) else 0


def parts(root: Path) -> Iterator[DirectoryPart]:
    """Check the records, each model's facts, state and checkpoints, and the archives. Reads all bytes.

    Raises StoreError if a folder cannot be read.
    """
    yield _checked(root / RECORDS, partial(fault_of, check="integrity_check"))
    for folder in _models(root):
        yield _checked(folder / checkpoints.FACTS, lambda path: checkpoints.read_facts(path.parent))
        if (folder / "state.json").exists():
            yield _checked(folder / "state.json", lambda path: UserState.model_validate_json(path.read_text("utf-8")))
        for step in checkpoint_files.steps(folder / "checkpoints"):
            yield _checked(checkpoint_files.path_of(folder / "checkpoints", step), checkpoint_files.read)
    for note in sorted((root / "exports").glob("*.json")):
        yield _checked(note, _fault_of_export)


def backup(root: Path, output: Path) -> int:
    """Copy the records and the models of `root` to the new folder `output`, atomically, verify the copy, print its damaged
    parts, and return the exit code. A server may be running.

    The records are copied first. A checkpoint that is newer than they are names its own train request, so a restored
    server knows that the request was applied. A copy with damaged parts stays, since the rest of it may be needed.
    Raises ConfigError, StoreError.
    """
    if output.exists():
        raise ConfigError(f"{output} exists already; name a new folder")
    os.umask(UMASK)
    scratch = output.with_name(f".{output.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        if (root / RECORDS).exists():
            _copy_records(root / RECORDS, scratch / RECORDS)
        if (root / PROMPT_DATE).exists():
            shutil.copy(root / PROMPT_DATE, scratch)
        count = sum(_copy_model(folder, scratch / folder.relative_to(root)) for folder in _models(root))
        faulty = [part for part in parts(scratch) if part.fault or part.unchecked]
        scratch.rename(output)
        sync(output.parent)
    except OSError as error:
        raise ConfigError(f"{root} could not be copied to {output}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for part in faulty:
        echo(f"damaged: {part.path}: {part.fault or part.unchecked}".replace(str(scratch), str(output)))
    echo(f"{output}: records and {count} checkpoints")
    if faulty:
        echo(f"{len(faulty)} parts of the copy are not whole. Check {root} with `offbook verify`; keep older backups")
    return _NOT_WHOLE if faulty else 0


def _models(root: Path) -> list[Path]:
    """The folders of all models, also of those without model.json."""
    folders = sorted(path for path in root.glob("*/models/*") if path.is_dir() and not path.name.startswith("."))
    return [path for path in folders if (path / checkpoints.FACTS).exists() or (path / "checkpoints").is_dir()]


def _checked(path: Path, check: Callable[[Path], object]) -> DirectoryPart:
    """Run a check that returns a fault as text, or raises for one."""
    try:
        if path.exists() and not path.is_dir() and not checkpoint_files.is_file(path):
            return DirectoryPart(path, fault="it is not a regular file")  # to read a FIFO may block forever
        fault = check(path)
    except (FileNotFoundError, ValueError, EngineError) as error:
        return DirectoryPart(path, fault=str(error))
    except StoreError as error:
        return DirectoryPart(path, unchecked=str(error))
    except (OSError, MemoryError) as error:
        return DirectoryPart(path, unchecked=str(checkpoint_files.not_checked(path, error)))
    return DirectoryPart(path, fault if isinstance(fault, str) else None)


def _print(part: DirectoryPart) -> None:
    if part.fault is not None:
        echo(f"damaged: {part.path}: {part.fault}")
    if part.unchecked is not None:
        echo(f"not checked: {part.unchecked}")


def _fault_of_export(note: Path) -> str | None:
    state = ArchiveState.model_validate_json(note.read_text("utf-8"))
    whole = checkpoint_files.digest(note.with_suffix(".tar")) == state.sha256
    return None if whole else "its archive does not have the stored SHA-256"


def _repaired(path: Path) -> str:
    """Rename a damaged part and the files that belong to it, and return what was done.

    A model's facts are written again if a checkpoint has them. In place of damaged or missing records, empty ones are
    created, because the server starts none beside checkpoints.
    """
    actions: list[str] = []
    for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm") if path.name == RECORDS)):
        if file.exists():
            actions.append(f"put aside as {put_aside(file)}")
    if path.name == RECORDS:
        from .records.store import create_file  # only a repair needs SQLAlchemy, whose import is a quarter of a check

        create_file(path)
        actions.append("new empty records are in its place")
    facts = checkpoints.recovered_facts(path.parent) if path.name == checkpoints.FACTS else None
    if facts is not None:
        checkpoints.write_facts(path.parent, facts)
        actions.append(f"written again from its newest checkpoint: {facts}")
    return "; ".join(actions) or "cannot be repaired: the file is missing, and no whole checkpoint has its content"


def _copy_records(source: Path, target: Path) -> None:
    try:
        with closing(sqlite3.connect(source, timeout=60.0)) as live, closing(sqlite3.connect(target)) as copy:
            live.backup(copy, pages=4096)
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise StoreError(f"could not copy the records at {source}: {error}") from error
    sync(target)


def _copy_model(folder: Path, target: Path) -> int:
    """Copy a model and return the number of its checkpoints.

    One that is deleted meanwhile is left out. Raises OSError.
    """
    target.mkdir(parents=True)
    for name in (checkpoints.FACTS, "state.json"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, target / name)
            sync(target / name)
    count = 0
    for step in sorted(checkpoint_files.steps(folder / "checkpoints")):
        path = checkpoint_files.path_of(folder / "checkpoints", step)
        copy = target / "checkpoints" / path.name
        try:
            shutil.copytree(path, copy)
        except (FileNotFoundError, shutil.Error):
            if path.is_dir():
                raise
            shutil.rmtree(copy, ignore_errors=True)
            continue
        for file in copy.iterdir():
            sync(file)
        count += 1
    return count
