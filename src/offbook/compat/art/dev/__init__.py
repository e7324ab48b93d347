"""Stands for `art.dev`, whose option sets are dicts."""

from typing import Any

from ..modules import names_in

EngineArgs = InitArgs = InternalModelConfig = PeftArgs = TrainConfig = TrainerArgs = dict[str, Any]

__all__ = ["EngineArgs", "InitArgs", "InternalModelConfig", "PeftArgs", "TrainConfig", "TrainerArgs"]

__getattr__ = names_in(__name__)
