"""A model pinned to one of its steps, to compare, chat with or serve."""

from __future__ import annotations

from typing import Any

from offbook import TrainableModel


class ModelAtStep(TrainableModel[Any]):
    """A model whose calls, evaluations and logs use the fixed `step`."""

    def __init__(self, model: TrainableModel, step: int) -> None:
        super().__init__(model.name, model.project, model.base_model, model.backend, model.lora)
        self._step = step

    async def get_step(self) -> int:
        """The pinned step."""
        return self._step

    def inference_name(self, step: int | None = None) -> str:
        """The `model` field of requests: the pinned step, or `step`."""
        return super().inference_name(self._step if step is None else step)
