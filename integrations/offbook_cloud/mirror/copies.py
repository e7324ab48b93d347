"""Copies a model between a directory and a place, without a server."""

from __future__ import annotations

from pathlib import Path

from offbook.base.errors import ConfigError, StoreError
from offbook.engine.checkpoint_files import whole
from offbook.server.directory_lock import DirectoryLock, make_private
from offbook.server.models.checkpoints import FACTS
from offbook.server.stored_models import find_model

from .place import mirror_place
from .pulls import check_history, ignore_damaged, pull
from .remote_models import STATE, remote_models, upload


async def push(root: Path, url: str, name: str) -> list[int]:
    """Upload the whole checkpoints that the place lacks, the newest first, and return their steps.

    Raises ConfigError for an unknown model and for another training at the place, StoreError.
    """
    place = mirror_place(url)
    model, _ = find_model(root, name)
    folder = model.relative_to(root).as_posix()
    there = (await remote_models(place)).get(folder)
    complete = set(there.complete()) if there is not None else set[int]()
    if there is not None:
        await check_history(model / "checkpoints", place, there)
    checkpoints = list(whole(model / "checkpoints", ignore_damaged))
    missing = [each for each in checkpoints if each.step not in complete]
    if not checkpoints:
        raise ConfigError(f"model {name!r} is at step 0: nothing has been trained yet, so there is nothing to push")
    try:
        for path in (model / FACTS, model / STATE):
            if path.exists():
                await place.upload(f"{folder}/{path.name}", path)
        for checkpoint in missing:
            await upload(place, folder, checkpoint)
    except OSError as error:
        raise StoreError(f"{model} could not be read: {error}") from error
    return [checkpoint.step for checkpoint in missing]


async def pull_model(root: Path, url: str, name: str) -> list[Path]:
    """Pull a model's newest step, if it is newer than the directory's, and return the folder of its checkpoint.

    Raises ConfigError, also while a server runs on the directory, StoreError.
    """
    place = mirror_place(url)
    make_private(root)
    lock = DirectoryLock(root)
    try:
        return await pull(root, place, name)
    finally:
        lock.release()
