"""Uploads checkpoints to a mirror: of a running server, which waits for none, or of a directory."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from offbook.base.clock import backoff_seconds
from offbook.base.errors import ConfigError, StoreError
from offbook.engine.checkpoint_files import whole
from offbook.server.models.checkpoints import FACTS
from offbook.server.models.registry import ModelRegistry, ServedModel
from offbook.server.stored_models import find_model

from .place import BucketPlace
from .pulls import check_history, ignore_damaged
from .remote_models import STATE, remote_models, upload

logger = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between two attempts, and between two looks for changes that nobody announced, such as an import."""


class MirrorUploads:
    """Keeps a place up to date with a registry's models: for each, its newest step first, then those before it.

    Logs the first failure and the recovery, and retries in between. Nothing is deleted at the place.
    """

    def __init__(self, place: BucketPlace, root: Path, registry: ModelRegistry) -> None:
        self._place = place
        self._root = root
        self._registry = registry
        self._uploaded: dict[str, set[int]] | None = None  # None: the place is not listed yet
        self._written: dict[Path, int] = {}  # small file -> its modification time when it was uploaded
        self._failures: dict[str, int] = {}  # model -> attempts since its last success
        self._failing = False
        self._changed = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in a task of the running event loop."""
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        """A checkpoint was committed."""
        self._changed.set()

    def steps_behind(self, model: ServedModel) -> int | None:
        """How many steps the newest one at the place is older than the model; None until the place was listed."""
        if self._uploaded is None:
            return None
        return max(0, model.step - max(self._uploaded.get(self._folder(model), ()), default=0))

    async def finish(self, deadline: float) -> None:
        """Upload what is left, for at most `deadline` seconds; what fails now is not tried again before the next start."""
        if self._task is None:
            return
        self._closing = True
        self._changed.set()
        done, _ = await asyncio.wait([self._task], timeout=deadline)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task])
        if missing := [f"{model.facts.name} {sorted(steps)}" for model, steps in self._pending()]:
            logger.warning(
                "The mirror %s lacks steps of %s; the next start with --mirror uploads them",
                self._place.url,
                ", ".join(missing),
            )

    def _folder(self, model: ServedModel) -> str:
        return model.folder.relative_to(self._root).as_posix()

    def _pending(self) -> list[tuple[ServedModel, set[int]]]:
        uploaded = self._uploaded or {}
        pairs = [
            (model, set(model.checkpoints) - uploaded.get(self._folder(model), set()))
            for model in self._registry.models()
        ]
        return [(model, steps) for model, steps in pairs if steps]

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            attempt = await self._upload_pending()
            if self._closing:
                return
            if attempt == 0 and self._pending():
                continue  # committed while the last upload ran
            pause = backoff_seconds(attempt, FIRST_PAUSE, LONGEST_PAUSE) if attempt else LONGEST_PAUSE
            try:
                await asyncio.wait_for(self._changed.wait(), pause)
            except TimeoutError:
                continue

    async def _upload_pending(self) -> int:
        """Upload all that is pending, each model until its first failure, and return the most failures of a model."""
        try:
            if self._uploaded is None:
                listed = await remote_models(self._place)
                self._uploaded = {folder: set(model.complete()) for folder, model in listed.items()}
                self._failures.pop("", None)
        except StoreError as error:
            self._failed("", error)
            return self._failures[""]
        for model in self._registry.models():
            folder = self._folder(model)
            try:
                await self._upload_model(model, self._uploaded.setdefault(folder, set()))
                self._failures.pop(folder, None)
            except (StoreError, OSError) as error:
                self._failed(folder, error)
        if self._failing and not self._failures:
            self._failing = False
            logger.info("The mirror %s is up to date again", self._place.url)
        return max(self._failures.values(), default=0)

    async def _upload_model(self, model: ServedModel, uploaded: set[int]) -> None:
        """Upload a model's small files if they changed, and its checkpoints. Raises StoreError."""
        for path in (model.folder / FACTS, model.folder / STATE):
            if model.checkpoints and path.exists() and self._written.get(path) != (written := path.stat().st_mtime_ns):
                await self._place.upload(f"{self._folder(model)}/{path.name}", path)
                self._written[path] = written
        while left := set(model.checkpoints) - uploaded:
            checkpoint = model.checkpoints[max(left)]
            try:
                await upload(self._place, self._folder(model), checkpoint)
            except FileNotFoundError:
                if checkpoint.path.exists():
                    raise StoreError(f"checkpoint {checkpoint.path} has lost a file") from None
                logger.info("Step %d of %s was deleted before its upload", checkpoint.step, model.facts.name)
                return
            uploaded.add(checkpoint.step)

    def _failed(self, folder: str, error: StoreError | OSError) -> None:
        self._failures[folder] = self._failures.get(folder, 0) + 1
        if not self._failing:
            self._failing = True
            logger.error("%s. Training goes on; the upload is tried again", error)


async def push(root: Path, url: str, name: str) -> list[int]:
    """Upload the whole checkpoints that the place lacks, the newest first, and return their steps.

    Raises ConfigError for an unknown model and for another training at the place, StoreError.
    """
    place = BucketPlace(url)
    model, _ = find_model(root, name)
    folder = model.relative_to(root).as_posix()
    there = (await remote_models(place)).get(folder)
    complete = set(there.complete()) if there is not None else set[int]()
    if there is not None:
        await check_history(model / "checkpoints", place, there)
    checkpoints = list(whole(model / "checkpoints", ignore_damaged))
    missing = [checkpoint for checkpoint in checkpoints if checkpoint.step not in complete]
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
