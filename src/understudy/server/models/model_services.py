"""The services for the models of one directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...config import DEFAULT_NAME
from ...errors import ConfigError
from ...wire import RegisterRequest
from ..errors import ApiError
from ..sampler.sampler import SamplerAdapters
from .base_model import BaseModelPath
from .leases import AdapterLeases
from .registration import MAX_RANK, ModelRegistration
from .registry import ModelRegistry
from .swaps import CheckpointSwaps


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
    registry = ModelRegistry.read(root, base, default)
    leases = AdapterLeases(registry, adapters)
    registration = ModelRegistration(root, registry, leases, max_rank)
    if default != DEFAULT_NAME or registry.on_other_base(default) is None:
        try:
            registration.register(RegisterRequest(name=default, project=project, base_model=base.name))
        except ApiError as error:
            raise ConfigError(f"--name {default}: {error} Use another --name or another --dir") from error
    return ModelServices(registry, leases, CheckpointSwaps(registry, leases), registration)
