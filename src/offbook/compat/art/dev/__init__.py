"""Stands for `art.dev`, whose option sets are dicts. A model takes an `InternalModelConfig` as `_internal_config`,
`train()` takes a `TrainConfig` as `_config`."""

from typing import Any

from ..modules import names_in

EngineArgs = InitArgs = InternalModelConfig = PeftArgs = TrainConfig = TrainerArgs = dict[str, Any]

__all__ = ["EngineArgs", "InitArgs", "InternalModelConfig", "PeftArgs", "TrainConfig", "TrainerArgs"]

__getattr__ = names_in(__name__)
