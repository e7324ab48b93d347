"""Checkpoints that come into use, and those that go."""

from __future__ import annotations

import asyncio
import logging

from ...engine import checkpoint_files
from ...errors import EngineError
from ..errors import ApiError
from . import checkpoints
from .leases import AdapterLeases
from .registry import ModelRegistry

log = logging.getLogger(__name__)


class CheckpointSwaps:
    """Changes what a model's name means, while calls go on."""

    def __init__(self, registry: ModelRegistry, leases: AdapterLeases) -> None:
        self._registry = registry
        self._leases = leases

    async def advance(self, name: str, step: int) -> str | None:
        """Take the learner's new checkpoint into use: loaded first, then `name` means it. A sampler that cannot load
        it now is asked again by the next call; returns its reason. Raises EngineError for a checkpoint that is broken."""
        model = self._registry.model(name)
        try:
            checkpoint = checkpoint_files.read(checkpoint_files.path_of(model.checkpoint_folder, step), contents=False)
        except EngineError as error:
            raise EngineError(f"The learner's checkpoint cannot be used: {error}") from error
        problem = None
        try:
            await self._leases.load(model.adapter(step), checkpoint)
        except EngineError as error:
            problem = str(error)
            log.error("Step %d of %s was saved, but is not loaded yet: %s", step, name, error)
        model.checkpoints[step] = checkpoint
        return problem

    async def delete(self, name: str, step: int) -> None:
        """Remove from routing, wait for its calls, unload, delete. Raises ApiError: 404, and 409 for the newest."""
        model = self._registry.model(name)
        route = model.route(step)
        if step == model.step:
            raise ApiError(
                409, f"Step {step} is the newest of {name!r} and is never deleted.", "step", "newest_checkpoint"
            )
        if step == 0:
            raise ApiError(409, "Step 0 is the base model; it has no checkpoint to delete.", "step", "no_checkpoint")
        checkpoint = model.checkpoints.pop(step)
        try:
            async with self._leases.withdrawn(route.adapter):
                await asyncio.to_thread(checkpoints.delete, checkpoint)
        except BaseException:
            if checkpoint.path.is_dir():
                model.checkpoints[step] = checkpoint
            raise
