"""Which names mean which step of which model."""

from __future__ import annotations

import logging
from pathlib import Path

from ...errors import ConfigError
from ..errors import ApiError
from ..sampler.transport import SERVED_NAME
from . import checkpoints
from .base_model import BaseModelPath
from .checkpoints import ModelFacts
from .model import ModelRoute, ServedModel

log = logging.getLogger(__name__)

LATEST = "lora:latest"


class ModelRegistry:
    """All models of one directory by name. Those built on another base are known, and refused by name."""

    def __init__(self, base: BaseModelPath, default: str) -> None:
        self.base = base
        self._default = default
        self._models: dict[str, ServedModel] = {}
        self._elsewhere: dict[str, ModelFacts] = {}

    @classmethod
    def read(cls, root: Path, base: BaseModelPath, default: str) -> ModelRegistry:
        """The models of a directory. Raises ConfigError when two have one name."""
        registry = cls(base, default)
        for folder, facts in checkpoints.scan_models(root, mend=True):
            if not base.is_called(facts.base_model):
                registry._elsewhere[facts.name] = facts
            elif facts.name in registry._models:
                other = registry._models[facts.name].folder
                raise ConfigError(f"Two models are called {facts.name!r}: {other} and {folder}. Move one elsewhere")
            else:
                registry.add(ServedModel(folder, facts, checkpoints.scan(folder / "checkpoints")))
        for facts in registry._elsewhere.values():
            log.warning("Model %s is built on %s and is not served by this server", facts.name, facts.base_model)
        return registry

    def add(self, model: ServedModel) -> None:
        """Serve a model from now on."""
        self._models[model.facts.name] = model

    def get(self, name: str) -> ServedModel | None:
        return self._models.get(name)

    def on_other_base(self, name: str) -> ModelFacts | None:
        """A model of this directory that is built on another base, and not served."""
        return self._elsewhere.get(name)

    def models(self) -> list[ServedModel]:
        """Every served model, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def names(self) -> list[str]:
        """What `/v1/models` lists: each model, `name@step` for the base and for every checkpoint; last, the base's own
        name, unless a model has it."""
        names = [
            name
            for model in self.models()
            for name in (model.facts.name, *(model.adapter(step) for step in sorted({0, *model.checkpoints})))
        ]
        return [*names, self.base.name] if self._is_base(self.base.name) else names

    def model(self, name: str) -> ServedModel:
        """A model by its own name. Raises ApiError 404, which lists the names."""
        model = self._models.get(name)
        if model is not None:
            return model
        if name in self._elsewhere:
            other = self._elsewhere[name].base_model
            raise ApiError(
                404,
                f"Model {name!r} is built on {other!r}; this server serves {self.base.name!r}: start one with --model {other}",
                "model",
                "model_not_found",
            )
        known = ", ".join(sorted(self._models))
        base = f"; its base model {self.base.name!r} can be called, and is never trained"
        raise ApiError(404, f"There is no model {name!r} here. Registered: {known}{base}", "model", "model_not_found")

    def resolve(self, name: str) -> ModelRoute:
        """What a call's `model` means now. The base's own name means the base, as in vLLM, and belongs to no model: what
        is recorded of such calls trains none. Raises ApiError: 404 unknown, 400 ambiguous; both list the names."""
        if name == LATEST:
            return self._latest().route()
        if self._is_base(name):
            return ModelRoute(name, 0, SERVED_NAME)
        plain, at, number = name.partition("@")
        model = self.model(plain)
        if not at:
            return model.route()
        if not number.isdecimal():
            raise ApiError(
                404,
                f"{name!r}: after @ comes a step's number, such as {model.adapter(model.step)}",
                "model",
                "model_not_found",
            )
        return model.route(int(number))

    def _is_base(self, name: str) -> bool:
        """Whether a name is the base's own; a model of that name takes precedence."""
        return name == self.base.name and name not in self._models and name not in self._elsewhere

    def _latest(self) -> ServedModel:
        others = [model for name, model in sorted(self._models.items()) if name != self._default]
        if len(others) > 1:
            names = ", ".join(model.facts.name for model in others)
            raise ApiError(
                400,
                f"{LATEST!r} is ambiguous: several models are registered ({names}); name one",
                "model",
                "ambiguous_model",
            )
        return others[0] if others else self.model(self._default)
