"""The services for the models of one directory. Checkpoints are taken into use and deleted while calls run."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from offbook.base.config import MAX_RANK
from offbook.base.errors import ConfigError, EngineError
from offbook.base.server_options import DEFAULT_NAME
from offbook.base.wire import AdoptRequest, ModelState, RegisterRequest

from ...engine import checkpoint_files
from ..base_model import BaseModelPath
from ..errors import ApiError
from ..sampler.pool import SamplerAdapters
from . import checkpoints
from .leases import AdapterLeases
from .registration import ModelRegistration
from .registry import ModelRegistry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelServices:
    """The services for models, which share one registry."""

    registry: ModelRegistry
    leases: AdapterLeases
    swaps: CheckpointSwaps
    registration: ModelRegistration


def open_models(
    root: Path, base: BaseModelPath, default: str, project: str, adapters: SamplerAdapters, max_rank: int = MAX_RANK
) -> ModelServices:
    """Read the models in the directory `root`, and register the model `default` in `project`.

    `max_rank`: largest LoRA rank that the sampler accepts. If `default` is the default of --name, and the directory
    has that model with another base, no model is registered. Raises ConfigError if `default` cannot be registered, or
    if two models have the same name.
    """
    registry = ModelRegistry.read(root, base)
    leases = AdapterLeases(registry, adapters)
    registration = ModelRegistration(root, registry, leases, max_rank)
    if default != DEFAULT_NAME or registry.on_other_base(default) is None:
        try:
            registration.register(RegisterRequest(name=default, project=project, base_model=base.name))
        except ApiError as error:
            raise ConfigError(f"--name {default}: {error} Use another --name or another --dir") from error
    return ModelServices(registry, leases, CheckpointSwaps(registry, leases), registration)


class CheckpointSwaps:
    """Changes which checkpoints the calls to a model can use."""

    def __init__(self, registry: ModelRegistry, leases: AdapterLeases) -> None:
        self._registry = registry
        self._leases = leases

    async def advance(self, name: str, step: int) -> str | None:
        """Load the learner's new checkpoint in the sampler, then route calls to `name` to it.

        If the sampler cannot load it now, returns the reason; the next call tries again. Returns None otherwise. Raises
        EngineError for a damaged checkpoint, StoreError for one that cannot be read.
        """
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
            logger.error("Step %d of %s is saved, but not loaded yet: %s", step, name, error)
        model.checkpoints[step] = checkpoint
        return problem

    async def adopt(self, name: str, request: AdoptRequest) -> ModelState:
        """Make a step of another model the newest step of `name`, and route calls to it. If it is, nothing changes.

        Raises ApiError: 404 for an unknown model or step, 409 if `name` is not at the step `after` or the models' LoRA shapes
        differ, 400 for its own steps. Raises EngineError for a damaged checkpoint, and OSError.
        """
        model, origin = self._registry.model(name), self._registry.model(request.model)
        source = origin.route(request.step)
        if origin is model:
            raise ApiError(400, f"Step {request.step} is a step of {name!r} itself", "model", "invalid_value")
        newest = model.checkpoints.get(model.step)
        known = None if newest is None else newest.note.forked_from
        if known is not None and (known.model, known.step) == (request.model, request.step):
            return model.state()
        if model.step != request.after:
            raise ApiError(
                409,
                f"Model {name!r} is at step {model.step}, not {request.after}: what was compared with step {request.after} may "
                "be worse than its newest step. Compare again",
                "after",
                "model_conflict",
            )
        if origin.facts.lora != model.facts.lora:
            raise ApiError(409, f"{source.adapter} has another LoRA shape than {name!r}", "model", "model_conflict")
        async with self._leases.lease(source.adapter):
            copied, start = model.step + 1, origin.checkpoints[request.step]
            await asyncio.to_thread(checkpoints.copy_step, model.checkpoint_folder, start, name, copied)
        if (problem := await self.advance(name, copied)) is not None:
            logger.error("Step %d of %s is adopted, but not loaded yet: %s", copied, name, problem)
        return model.state()

    async def delete(self, name: str, step: int) -> None:
        """Delete a checkpoint: stop routing calls to it, wait for its calls, unload it, delete its folder.

        Raises ApiError 404 for an unknown model or step, and 409 for the newest step and for step 0.
        """
        model = self._registry.model(name)
        route = model.route(step)
        if step == model.step:
            raise ApiError(
                409,
                f"Step {step} is the newest of {name!r}, and the newest step cannot be deleted.",
                "step",
                "newest_checkpoint",
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
