"""Takes the newest whole step of a directory and of its mirror: a step that only the mirror has is pulled."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

from pydantic import ValidationError

from offbook.base.errors import ConfigError, EngineError, OffbookError, StoreError
from offbook.base.wire import UserState
from offbook.engine import checkpoint_files
from offbook.engine.checkpoint_files import NOTE, CheckpointNote, make_folder, put_aside, sync
from offbook.server.directory_lock import DirectoryLock, make_private
from offbook.server.models.checkpoints import FACTS, ModelFacts, read_facts, write_facts, write_text
from offbook.server.records.database import fault_of
from offbook.server.records.store import create_file

from .place import BucketPlace
from .remote_models import STATE, RemoteModel, other_training, remote_models

logger = logging.getLogger(__name__)

SCRATCH = ".scratch-mirror"
"""Folder of an unfinished pull beside the checkpoints. The next start of the server sweeps it."""


async def pull(root: Path, place: BucketPlace, name: str | None = None) -> list[Path]:
    """Pull the newest step of every model (or of those called `name`) that is newer at the place, and return the folders
    of the pulled checkpoints.

    The directory must be locked. A damaged checkpoint at the place is logged, and the one before it taken. Raises ConfigError
    for two different trainings and for an unknown name, StoreError.
    """
    models = [model for model in (await remote_models(place)).values() if name in (None, model.name)]
    if name is not None and not any(model.complete() for model in models):
        raise ConfigError(f"mirror {place.url}: there is no complete checkpoint of a model {name!r}")
    pulled: list[Path] = []
    for model in sorted(models, key=lambda model: model.folder):
        try:
            path = await _pull_model(root, place, model)
        except OSError as error:
            raise _unwritten(root, model, error) from error
        if path is not None:
            pulled.append(path)
            logger.info("Pulled step %d of %s from %s", int(path.name), model.name, place.url)
    return pulled


async def pull_model(root: Path, url: str, name: str) -> list[Path]:
    """Pull a model's newest step, if it is newer than the directory's, and return the folder of its checkpoint.

    Raises ConfigError, also while a server runs on the directory, StoreError.
    """
    place = BucketPlace(url)
    make_private(root)
    lock = DirectoryLock(root)
    try:
        return await pull(root, place, name)
    finally:
        lock.release()


async def _pull_model(root: Path, place: BucketPlace, model: RemoteModel) -> Path | None:
    folder = root / model.folder
    facts = await _facts(place, model)
    _check_same(folder, facts, place)
    await check_history(folder / "checkpoints", place, model)
    newest = next((found.step for found in checkpoint_files.whole(folder / "checkpoints", ignore_damaged)), 0)
    for step in model.complete():
        if step <= newest:
            return None
        try:
            path = await _pull_step(root, place, model, step)
        except EngineError as error:
            note = model.path(step, NOTE)
            await place.rename(note, f"{note}.damaged")  # the step is free for the training that goes on before it
            logger.warning("Step %d of %s at %s is damaged and was not used: %s", step, model.name, place.url, error)
            continue
        if facts is not None and not (folder / FACTS).exists():
            write_facts(folder, facts)
        if STATE in model.own and not (folder / STATE).exists():
            await _pull_state(folder, place, model)
        return path
    return None


async def _pull_state(folder: Path, place: BucketPlace, model: RemoteModel) -> None:
    content = await place.read(f"{model.folder}/{STATE}")
    if content is None:
        return
    try:
        UserState.model_validate_json(content)
        write_text(folder / STATE, content.decode("utf-8"))
    except ValueError as error:
        logger.warning("%s of %s at %s is damaged and was not used: %s", STATE, model.name, place.url, error)


async def _pull_step(root: Path, place: BucketPlace, model: RemoteModel, step: int) -> Path:
    """Download a checkpoint, verify it, and rename it to its place. Raises EngineError for a damaged one, OSError."""
    target = checkpoint_files.path_of(root / model.folder / "checkpoints", step)
    files = {name: size for name, size in model.files[step].items() if name in checkpoint_files.FILES}
    note = await place.read(model.path(step, NOTE)) or b""
    _check_sizes(note, files)
    if sum(files.values()) > shutil.disk_usage(root).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _begin_records(root)
    scratch = target.parent / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    make_folder(scratch / target.name)
    try:
        for name in sorted(files):
            if name == NOTE:
                (scratch / target.name / name).write_bytes(note)
            else:
                await place.download(model.path(step, name), files[name], scratch / target.name / name)
            sync(scratch / target.name / name)
        checkpoint_files.read(scratch / target.name)
        sync(scratch / target.name)
        if target.exists():  # not whole, or it would have been the newest
            logger.error("The damaged checkpoint %s was set aside as %s", target, put_aside(target))
        (scratch / target.name).rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _check_sizes(note: bytes, files: dict[str, int]) -> None:
    """Raise EngineError if the place has files of other sizes than the note says, before room is sought for them."""
    try:
        sizes = CheckpointNote.model_validate_json(note).sizes
    except ValueError as error:
        raise EngineError(f"its {NOTE} cannot be read: {error}") from error
    if other := [name for name, size in files.items() if sizes.get(name, size) != size]:
        raise EngineError(f"{other[0]} has {files[other[0]]} bytes, {sizes[other[0]]} were written")


def _begin_records(root: Path) -> None:
    """Create empty records in a directory that was lost as a whole: the server starts none beside checkpoints, since a
    training whose records alone are lost might repeat a step. Raises StoreError, OSError."""
    records = root / "records.db"
    if not records.exists() and fault_of(records, None) is None:
        create_file(records)


async def _facts(place: BucketPlace, model: RemoteModel) -> ModelFacts | None:
    """The place's `model.json`; None if it is missing, damaged or another model's, since the server recovers it from a
    checkpoint."""
    text = await place.read(f"{model.folder}/{FACTS}") if FACTS in model.own else None
    try:
        facts = ModelFacts.model_validate_json(text) if text is not None else None
    except ValidationError:
        facts = None
    if text is not None and (facts is None or f"{facts.project}/models/{facts.name}" != model.folder):
        logger.warning("%s of %s at %s is damaged or of another model", FACTS, model.name, place.url)
        return None
    return facts


def _check_same(folder: Path, facts: ModelFacts | None, place: BucketPlace) -> None:
    """Raise ConfigError if the directory has a model of this name with another base or LoRA."""
    try:
        own = read_facts(folder)
    except (FileNotFoundError, ValueError):
        return
    if facts is not None and (own.base_model, own.lora) != (facts.base_model, facts.lora):
        raise ConfigError(
            f"mirror {place.url}: its model {own.name} has the base {facts.base_model} and {facts.lora!r}, the one in "
            f"{folder} {own.base_model} and {own.lora!r}. Use another path in the URL"
        )


async def check_history(folder: Path, place: BucketPlace, model: RemoteModel) -> None:
    """Raise ConfigError if the newest step that both sides have differs."""
    for step in model.complete():
        path = checkpoint_files.path_of(folder, step) / NOTE
        if path.is_file():
            if path.read_bytes() != await place.read(model.path(step, NOTE)) and _is_whole(path.parent):
                raise ConfigError(other_training(place, model.folder, step))
            return


def _is_whole(path: Path) -> bool:
    try:
        checkpoint_files.read(path)
    except EngineError:
        return False
    return True


def ignore_damaged(path: Path, error: OffbookError) -> None:
    """Pass over a damaged checkpoint, which the server reports when it reads the directory. Raises StoreError."""
    if isinstance(error, StoreError):
        raise error


def _unwritten(root: Path, model: RemoteModel, error: OSError) -> StoreError:
    need = sum(model.files[model.complete()[0]].values()) / 2**20 if model.complete() else 0.0
    return StoreError(
        f"--dir {root}: a checkpoint of {model.name} ({need:.1f} MiB) could not be pulled: {error.strerror or error}. "
        "Free space there, or use another --dir"
    )
