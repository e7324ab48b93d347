"""A model held at one of its steps: to compare with, to talk to, to serve."""

from __future__ import annotations

from typing import Any

from understudy import TrainableModel


class ModelAtStep(TrainableModel[Any]):
    """The same model, whose calls, evaluations and logs are those of `step`."""

    def __init__(self, model: TrainableModel, step: int) -> None:
        super().__init__(model.name, model.project, model.base_model, model.backend, model.lora)
        self._step = step

    async def get_step(self) -> int:
        """The step at which it is held."""
        return self._step

    def inference_name(self, step: int | None = None) -> str:
        """The name of that step, or of another."""
        return super().inference_name(self._step if step is None else step)
