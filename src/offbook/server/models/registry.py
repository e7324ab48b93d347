"""The models that this server serves, and the step of a model that a call's model name means."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from offbook.base.config import SELF, TrainConfig
from offbook.base.errors import ConfigError, EngineError
from offbook.base.wire import ModelState, name_at

from ...engine import checkpoint_files
from ...engine.checkpoint_files import Checkpoint
from ..base_model import BaseModelPath
from ..errors import ApiError
from ..sampler.transport import SERVED_NAME
from . import checkpoints
from .checkpoints import ModelFacts

logger = logging.getLogger(__name__)


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
            damaged=tuple(map(str, checkpoint_files.set_aside(self.checkpoint_folder, self.step))),
        )


class ModelRegistry:
    """All models of one directory by name. Models of another base are known but not served: calls to them get a 404."""

    def __init__(self, base: BaseModelPath) -> None:
        self.base = base
        self._models: dict[str, ServedModel] = {}
        self._on_other_base: dict[str, ModelFacts] = {}

    @classmethod
    def read(cls, root: Path, base: BaseModelPath) -> ModelRegistry:
        """Read the models of the directory `root`. Raises ConfigError if two of them have one name."""
        registry = cls(base)
        for folder, facts in checkpoints.scan_models(root, mend=True):
            if not base.is_called(facts.base_model):
                registry._on_other_base[facts.name] = facts
            elif facts.name in registry._models:
                other = registry._models[facts.name].folder
                raise ConfigError(
                    f"Two models are called {facts.name!r}: {other} and {folder}. Move one of the folders elsewhere"
                )
            else:
                registry.add(ServedModel(folder, facts, checkpoints.scan(folder / "checkpoints")))
        for facts in registry._on_other_base.values():
            logger.warning("Model %s is not served: its base model is %s", facts.name, facts.base_model)
        return registry

    def add(self, model: ServedModel) -> None:
        """Serve a model from now on."""
        self._models[model.facts.name] = model

    def get(self, name: str) -> ServedModel | None:
        """The served model of this name, or None."""
        return self._models.get(name)

    def on_other_base(self, name: str) -> ModelFacts | None:
        """The facts of a model of this directory that is not served because it has another base; else None."""
        return self._on_other_base.get(name)

    def models(self) -> list[ServedModel]:
        """All served models, sorted by name."""
        return [self._models[name] for name in sorted(self._models)]

    def names(self) -> list[str]:
        """The names that `/v1/models` lists, for instance `agent`, `agent@0`, `agent@1`, `tiny`.

        For each model its own name, `name@0` and `name@step` of every checkpoint. The base's name comes last, unless a
        model has that name.
        """
        names = [
            name
            for model in self.models()
            for name in (model.facts.name, *(model.adapter(step) for step in sorted({0, *model.checkpoints})))
        ]
        return [*names, self.base.name] if self._is_base(self.base.name) else names

    def model(self, name: str) -> ServedModel:
        """The served model of this name. Raises ApiError 404 that lists the names."""
        model = self._models.get(name)
        if model is not None:
            return model
        if name in self._on_other_base:
            other = self._on_other_base[name].base_model
            raise ApiError(
                404,
                f"Model {name!r} has the base model {other!r}; this server serves {self.base.name!r}. "
                f"Start one with --model {other}",
                "model",
                "model_not_found",
            )
        known = ", ".join(sorted(self._models))
        base = f". The base model {self.base.name!r} can be called, but is never trained"
        raise ApiError(404, f"There is no model {name!r} here. Registered: {known}{base}", "model", "model_not_found")

    def resolve(self, name: str) -> ModelRoute:
        """The route of a call by its `model`: a model, `name@step` or the base's own name.

        The base's name means the base without an adapter, as in vLLM. Calls to it train no model. Raises ApiError 404
        for an unknown name, which lists the names.
        """
        if self._is_base(name):
            return ModelRoute(name, 0, SERVED_NAME)
        model_name, separator, number = name.partition("@")
        model = self.model(model_name)
        if not separator:
            return model.route()
        if not number.isdecimal() or len(number) > 10:
            raise ApiError(
                404,
                f"{name!r}: a step number must follow the @, as in {model.adapter(model.step)}",
                "model",
                "model_not_found",
            )
        return model.route(int(number))

    def teacher(self, config: TrainConfig) -> Path | None:
        """The checkpoint folder of the teacher that a train request names. None: no teacher, the base, the trained model
        itself, or a teacher elsewhere. Raises ApiError as `resolve`."""
        if config.distill is None or config.distill.teacher == SELF or config.distill.endpoint is not None:
            return None
        route = self.resolve(config.distill.teacher)
        return checkpoint_files.path_of(self.model(route.model).checkpoint_folder, route.step) if route.step else None

    def _is_base(self, name: str) -> bool:
        return name == self.base.name and name not in self._models and name not in self._on_other_base
