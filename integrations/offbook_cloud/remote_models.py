"""The models at a place, in the folders that a server's directory has: `{project}/models/{name}/checkpoints/{n:04d}/`.

A checkpoint's offbook.json is written last, and has the sizes and digests of the other files: a step without it is a torn
upload, and is ignored.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

from offbook.base.errors import StoreError
from offbook.engine.checkpoint_files import FILES, NOTE, Checkpoint, is_step
from offbook.server.models.checkpoints import FACTS

from .place import BucketPlace

logger = logging.getLogger(__name__)

STATE = "state.json"
"""The user's object of a model: see UserState."""
LARGEST = 2**26
"""Bytes of an object that is read whole: model.json, state.json, offbook.json."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_PATH = re.compile(
    rf"(?P<folder>{_NAME}/models/{_NAME})/(?:(?P<own>{FACTS}|{STATE})|checkpoints/(?P<step>[0-9]{{4,}})/(?P<file>[^/]+))"
)


@dataclass
class RemoteModel:
    """A model at a place. `folder`: its path there and in a server's directory. `files`: step -> file -> bytes."""

    folder: str
    own: set[str] = field(default_factory=set[str])
    files: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])

    @property
    def name(self) -> str:
        return self.folder.rpartition("/")[2]

    def complete(self) -> list[int]:
        """The steps whose files are all there, newest first."""
        return sorted(
            (step for step, files in self.files.items() if all(name in files for name in FILES)), reverse=True
        )

    def path(self, step: int, file: str) -> str:
        """The path of a checkpoint's file."""
        return path_of(self.folder, step, file)


def path_of(folder: str, step: int, file: str) -> str:
    """The path of a checkpoint's file, of the model with this folder."""
    return f"{folder}/checkpoints/{step:04d}/{file}"


async def remote_models(place: BucketPlace) -> dict[str, RemoteModel]:
    """The models at a place by their folders. Other objects are ignored. Raises StoreError."""
    models: dict[str, RemoteModel] = {}
    for path, size in (await place.sizes()).items():
        match = _PATH.fullmatch(path)
        if match is None or not (match["own"] or is_step(match["step"])):
            continue
        if size > LARGEST and (match["own"] or match["file"] == NOTE):
            logger.warning("%s at the mirror is ignored: it has %d bytes, more than %d", path, size, LARGEST)
            continue
        model = models.setdefault(match["folder"], RemoteModel(match["folder"]))
        if match["own"]:
            model.own.add(match["own"])
        else:
            model.files.setdefault(int(match["step"]), {})[match["file"]] = size
    return models


async def upload(place: BucketPlace, folder: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a place, its note last. One that is there already stays.

    Raises StoreError, also if the place has another checkpoint of this step, and FileNotFoundError if it was deleted.
    """
    content = (checkpoint.path / NOTE).read_bytes()
    marker = path_of(folder, checkpoint.step, NOTE)
    there = await place.read(marker)
    if there is None:
        for name in FILES:
            if name != NOTE:
                await place.upload(path_of(folder, checkpoint.step, name), checkpoint.path / name)
        if await place.create(marker, content):
            return
        there = await place.read(marker)
    if there != content:
        raise StoreError(other_training(place, folder, checkpoint.step))


def other_training(place: BucketPlace, folder: str, step: int) -> str:
    """The error message for one step with two contents."""
    return (
        f"mirror {place.url}: step {step} of {folder} there is not the one of this directory, so they come from two "
        "trainings. Use another path in the URL, or move one of the two away"
    )
