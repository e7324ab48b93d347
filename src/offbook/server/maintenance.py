"""Checks, repairs and copies a server's directory."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offbook.base.errors import ConfigError, EngineError, StoreError
from offbook.base.wire import ArchiveState, UserState

from ..engine import checkpoint_files
from ..engine.checkpoint_files import put_aside, sync
from .directory_lock import UMASK, DirectoryLock
from .models import checkpoints
from .records.sqlite_file import fault_of

RECORDS = "records.db"
_DAMAGED = 1
"""Exit code of `verify` for a directory with damaged parts."""


@dataclass(frozen=True)
class DirectoryPart:
    """A file or folder that `verify` checks. `fault`: what is damaged; None if it is whole."""

    path: Path
    fault: str | None = None


def verify(root: Path, *, repair: bool) -> int:
    """Check all parts of the directory `root`, print the damaged ones, and return the exit code.

    `repair` renames damaged parts. Raises ConfigError while a server runs on the directory.
    """
    lock = DirectoryLock(root)
    damaged = whole = 0
    try:
        for part in parts(root):
            if part.fault is None:
                whole += 1
                continue
            damaged += 1
            print(f"damaged: {part.path}: {part.fault}")
            if repair:
                print(f"  {_repaired(part.path)}")
    finally:
        lock.release()
    print(f"{whole} parts are whole, {damaged} damaged{' and put aside' if damaged and repair else ''}")
    return _DAMAGED if damaged and not repair else 0


def parts(root: Path) -> Iterator[DirectoryPart]:
    """Check the records, each model's facts, state and checkpoints, and the archives. Reads all bytes."""
    if (root / RECORDS).exists():
        yield DirectoryPart(root / RECORDS, fault_of(root / RECORDS, "integrity_check"))
    for folder in _models(root):
        yield DirectoryPart(folder / checkpoints.FACTS, _fault_of_facts(folder))
        if (folder / "state.json").exists():
            yield DirectoryPart(folder / "state.json", _fault_of_json(folder / "state.json", UserState))
        for step in checkpoint_files.steps(folder / "checkpoints"):
            path = checkpoint_files.path_of(folder / "checkpoints", step)
            yield DirectoryPart(path, _fault_of_checkpoint(path))
    for note in sorted((root / "exports").glob("*.json")):
        yield DirectoryPart(note, _fault_of_export(note))


def backup(root: Path, output: Path) -> None:
    """Copy the records and the models of `root` to the new folder `output`, atomically. A server may be running.

    The records are copied first. A checkpoint that is newer than they are names its own train request, so a restored
    server knows that the request was applied. Raises ConfigError, StoreError.
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
        else:
            print(f"{root} has no {RECORDS}: back up records in PostgreSQL with its own tools")
        count = sum(_copy_model(folder, scratch / folder.relative_to(root)) for folder in _models(root))
        scratch.rename(output)
        sync(output.parent)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{output}: records and {count} checkpoints")


def _models(root: Path) -> list[Path]:
    """The folders of all models, also of those without model.json."""
    folders = sorted(path for path in root.glob("*/models/*") if path.is_dir() and not path.name.startswith("."))
    return [path for path in folders if (path / checkpoints.FACTS).exists() or (path / "checkpoints").is_dir()]


def _fault_of_facts(folder: Path) -> str | None:
    try:
        checkpoints.read_facts(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _fault_of_json(path: Path, kind: type[UserState]) -> str | None:
    try:
        kind.model_validate_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _fault_of_checkpoint(path: Path) -> str | None:
    try:
        checkpoint_files.read(path)
    except EngineError as error:
        return str(error)
    return None


def _fault_of_export(note: Path) -> str | None:
    try:
        state = ArchiveState.model_validate_json(note.read_text("utf-8"))
        whole = checkpoint_files.digest(note.with_suffix(".tar")) == state.sha256
    except (OSError, ValueError) as error:
        return str(error)
    return None if whole else "its archive does not have the stored SHA-256"


def _repaired(path: Path) -> str:
    """Rename a damaged part and the files that belong to it, and return what was done.

    A model's facts are written again if a checkpoint has them.
    """
    actions: list[str] = []
    for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm") if path.name == RECORDS)):
        if file.exists():
            actions.append(f"put aside as {put_aside(file)}")
    facts = checkpoints.recovered_facts(path.parent) if path.name == checkpoints.FACTS else None
    if facts is not None:
        checkpoints.write_facts(path.parent, facts)
        actions.append(f"written again from its newest checkpoint: {facts}")
    return "; ".join(actions) or "cannot be repaired: the file is missing, and no whole checkpoint has its content"


def _copy_records(source: Path, target: Path) -> None:
    """Copy a SQLite database that may be in use. Raises StoreError."""
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
