"""One model that this server serves, and the routes of calls to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from offbook.base.errors import EngineError
from offbook.base.wire import ModelState, name_at

from ...engine import checkpoint_files
from ...engine.checkpoint_files import Checkpoint
from ..errors import ApiError
from ..sampler.transport import SERVED_NAME
from .checkpoints import ModelFacts


@dataclass(frozen=True)
class ModelRoute:
    """Where a call is sent: step `step` of `model`. `adapter` is its model name in the sampler."""

    model: str
    step: int
    adapter: str


@dataclass
class ServedModel:
    """A registered model.

    `checkpoints` are those that calls may use, by step. One that is not swapped in yet, or is being deleted, is not
    in it.
    """

    folder: Path
    facts: ModelFacts
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict[int, Checkpoint])

    @property
    def step(self) -> int:
        """The newest step that calls may use; 0 is the base model."""
        return max(self.checkpoints, default=0)

    @property
    def checkpoint_folder(self) -> Path:
        """The folder with one folder per checkpoint."""
        return self.folder / "checkpoints"

    def adapter(self, step: int) -> str:
        """The name of a step's adapter in the sampler: `name@step`."""
        return name_at(self.facts.name, step)

    def route(self, step: int | None = None) -> ModelRoute:
        """The route of calls to a step (None: the newest). Raises ApiError 404, which lists the steps."""
        name, step = self.facts.name, self.step if step is None else step
        if step == 0:
            return ModelRoute(name, 0, SERVED_NAME)
        if step not in self.checkpoints:
            steps = ", ".join(str(number) for number in sorted({0, *self.checkpoints}))
            raise ApiError(404, f"Model {name!r} has no step {step}; it has {steps}", "model", "model_not_found")
        return ModelRoute(name, step, self.adapter(step))

    def applied(self, request_id: str) -> Checkpoint | None:
        """The checkpoint that a train request created, also before it is swapped in; None if there is none."""
        for checkpoint in self.checkpoints.values():
            if checkpoint.note.request_id == request_id:
                return checkpoint
        try:
            path = checkpoint_files.path_of(self.checkpoint_folder, self.step + 1)
            newest = checkpoint_files.read(path, contents=False)
        except EngineError:
            return None  # the usual case: there is no newer checkpoint
        return newest if newest.note.request_id == request_id else None

    def state(self) -> ModelState:
        """The model as clients see it."""
        newest = self.checkpoints.get(self.step)
        return ModelState(
            name=self.facts.name,
            project=self.facts.project,
            base_model=self.facts.base_model,
            step=self.step,
            lora=self.facts.lora,
            checkpoint=str(newest.path) if newest is not None else None,
        )
