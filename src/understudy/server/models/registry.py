"""Which names mean which step: models, their checkpoints, and who is using them right now."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...config import DEFAULT_NAME, LoraOptions
from ...engine import checkpoint_files
from ...engine.checkpoint_files import Checkpoint
from ...errors import ConfigError, EngineError
from ...wire import ForkRequest, ModelState, RegisterRequest, name_at
from ..errors import ApiError
from ..sampler.client import SamplerClient
from ..sampler.transport import SERVED_NAME
from . import checkpoints
from .base_model import BaseModel
from .checkpoints import ModelFacts

log = logging.getLogger(__name__)

LATEST = "lora:latest"
KEPT_LOADED = 4
"""Adapters of older steps that stay loaded while nobody calls them."""
MAX_RANK = 512
"""Of LoraOptions; vLLM has a limit of its own."""
RESERVED_PROJECTS = frozenset({"jobs", "key", "logs", "records.db", "server.json", "server.lock"})


@dataclass(frozen=True)
class Route:
    """What a name means now. `adapter` is the model name to send to the sampler."""

    model: str
    step: int
    adapter: str


@dataclass
class Model:
    """One registered model. `checkpoints` holds what may be called: by step, complete, not being deleted."""

    folder: Path
    facts: ModelFacts
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict[int, Checkpoint])

    @property
    def step(self) -> int:
        return max(self.checkpoints, default=0)

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints"

    def state(self) -> ModelState:
        newest = self.checkpoints.get(self.step)
        return ModelState(
            name=self.facts.name,
            project=self.facts.project,
            base_model=self.facts.base_model,
            step=self.step,
            lora=self.facts.lora,
            checkpoint=str(newest.path) if newest is not None else None,
        )


class ModelRegistry:
    """All models of one directory. Those built on another base are known, and refused by name."""

    def __init__(
        self, root: Path, base: BaseModel, default: str, sampler: SamplerClient, max_rank: int = MAX_RANK
    ) -> None:
        self._root = root
        self._base = base
        self._default = default
        self._sampler = sampler
        self._max_rank = max_rank
        self._models: dict[str, Model] = {}
        self._elsewhere: dict[str, ModelFacts] = {}
        self._leases: dict[str, int] = defaultdict(int)
        self._used: dict[str, float] = {}
        self._loading: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._returned = asyncio.Condition()

    @classmethod
    def open(
        cls, root: Path, base: BaseModel, default: str, project: str, sampler: SamplerClient, max_rank: int = MAX_RANK
    ) -> ModelRegistry:
        """Read the directory, and register the model `default`, unless one of that very name is on another base here.
        Raises ConfigError."""
        registry = cls(root, base, default, sampler, max_rank)
        for folder, facts in checkpoints.scan_models(root):
            if not base.is_called(facts.base_model):
                registry._elsewhere[facts.name] = facts
            elif facts.name in registry._models:
                other = registry._models[facts.name].folder
                raise ConfigError(f"Two models are called {facts.name!r}: {other} and {folder}. Move one elsewhere")
            else:
                registry._models[facts.name] = Model(folder, facts, checkpoints.scan(folder / "checkpoints"))
        for facts in registry._elsewhere.values():
            log.warning("Model %s is built on %s and is not served by this server", facts.name, facts.base_model)
        if default == DEFAULT_NAME and default in registry._elsewhere:
            return registry
        try:
            registry.register(RegisterRequest(name=default, project=project, base_model=base.name))
        except ApiError as error:
            raise ConfigError(f"--name {default}: {error} Give another --name or another --dir") from error
        return registry

    # ---- names

    def models(self) -> list[Model]:
        """Every served model, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def names(self) -> list[str]:
        """What `/v1/models` lists: each model, and `name@step` for the base and for every checkpoint."""
        return [
            name
            for model in self.models()
            for name in (
                model.facts.name,
                *(name_at(model.facts.name, step) for step in sorted({0, *model.checkpoints})),
            )
        ]

    def model(self, name: str) -> Model:
        """A model by its own name. Raises ApiError 404, which lists the names."""
        found = self._models.get(name)
        if found is not None:
            return found
        if name in self._elsewhere:
            other = self._elsewhere[name].base_model
            raise ApiError(
                404,
                f"Model {name!r} is built on {other!r}; this server serves {self._base.name!r}: start one with --model {other}",
                "model",
                "model_not_found",
            )
        known = ", ".join(sorted(self._models))
        raise ApiError(404, f"There is no model {name!r} here. Registered: {known}", "model", "model_not_found")

    def resolve(self, name: str) -> Route:
        """What a call's `model` means now. Raises ApiError: 404 unknown, 400 ambiguous; both list the names."""
        if name == LATEST:
            return self._at(self._latest())
        plain, at, number = name.partition("@")
        model = self.model(plain)
        if not at:
            return self._at(model)
        if not number.isdecimal():
            raise ApiError(
                404,
                f"{name!r}: after @ comes a step's number, such as {name_at(plain, model.step)}",
                "model",
                "model_not_found",
            )
        return self._at(model, int(number))

    def _latest(self) -> Model:
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

    def _at(self, model: Model, step: int | None = None) -> Route:
        name, step = model.facts.name, model.step if step is None else step
        if step == 0:
            return Route(name, 0, SERVED_NAME)
        if step not in model.checkpoints:
            steps = ", ".join(str(number) for number in sorted({0, *model.checkpoints}))
            raise ApiError(404, f"Model {name!r} has no step {step}; it has {steps}", "model", "model_not_found")
        return Route(name, step, name_at(name, step))

    # ---- calls in flight

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncGenerator[Route]:
        """The route of one call: its checkpoint is loaded, and neither unloaded nor deleted until the call ends."""
        route = self.resolve(name)
        self._leases[route.adapter] += 1
        try:
            await self._ensure_loaded(route)
            yield route
        finally:
            async with self._returned:
                self._leases[route.adapter] -= 1
                self._returned.notify_all()

    async def _ensure_loaded(self, route: Route) -> None:
        if route.step == 0:
            return
        self._used[route.adapter] = time.monotonic()
        if route.adapter in self._sampler.adapters and not self._loading[route.adapter].locked():
            return
        checkpoint = self._models[route.model].checkpoints.get(route.step)
        if checkpoint is None:
            raise ApiError(404, f"Step {route.step} of {route.model!r} was deleted", "model", "model_not_found")
        await self._load(route.adapter, checkpoint)

    async def _load(self, adapter: str, checkpoint: Checkpoint) -> None:
        async with self._loading[adapter]:
            await self._sampler.load(adapter, checkpoint.path)
            self._used[adapter] = time.monotonic()
        await self._trim()

    async def _trim(self) -> None:
        """Unload the adapters that were called longest ago, beyond the newest of each model and a few others."""
        newest = {name_at(model.facts.name, model.step) for model in self._models.values()}
        idle = [name for name in self._sampler.adapters if name not in newest and not self._leases[name]]
        idle.sort(key=lambda name: self._used.get(name, 0.0), reverse=True)
        for adapter in idle[KEPT_LOADED:]:
            async with self._loading[adapter]:
                if self._leases[adapter]:
                    continue
                try:
                    await self._sampler.unload(adapter)
                except EngineError as error:
                    log.warning("%s", error)

    # ---- changes

    def register(self, request: RegisterRequest, in_training: bool = False) -> ModelState:
        """Make a model, or find it. Raises ApiError 409 on another base model or project, and, once a step is made or
        `in_training`, on another LoRA shape."""
        self._check_base(request)
        if request.lora is not None:
            self._check_rank(request.lora)
        known = self._models.get(request.name)
        if known is None:
            facts = ModelFacts(
                name=request.name,
                project=request.project,
                base_model=self._base.name,
                lora=request.lora or LoraOptions(),
            )
            known = Model(self._new_folder(facts), facts)
            checkpoints.write_facts(known.folder, facts)
            self._models[request.name] = known
            return known.state()
        if request.project != known.facts.project:
            raise ApiError(
                409,
                f"Model {request.name!r} belongs to project {known.facts.project!r}, not {request.project!r}: "
                "names are unique on a server. Register it with that project, or start the server with "
                f"--project {request.project}.",
                "project",
                "model_conflict",
            )
        if request.lora is not None and request.lora != known.facts.lora:
            if known.step == 0 and not in_training:  # a slip in target_modules can be mended
                known.facts = known.facts.model_copy(update={"lora": request.lora})
                checkpoints.write_facts(known.folder, known.facts)
                return known.state()
            raise ApiError(
                409,
                f"Model {request.name!r} has the LoRA {known.facts.lora.model_dump()}, not {request.lora.model_dump()}: "
                "it is fixed by the first step; register another name.",
                "lora",
                "model_conflict",
            )
        return known.state()

    def _check_rank(self, lora: LoraOptions) -> None:
        if lora.r > self._max_rank:
            raise ApiError(
                400,
                f"lora.r {lora.r} is above this server's --max-lora-rank {self._max_rank}: start it with --max-lora-rank "
                f"{lora.r}, or take a smaller r",
                "lora.r",
                "invalid_value",
            )

    def _check_base(self, request: RegisterRequest) -> None:
        other = self._elsewhere.get(request.name)
        if other is not None:
            raise ApiError(
                409,
                f"Model {request.name!r} exists in this directory on base model {other.base_model!r}.",
                "base_model",
                "model_conflict",
            )
        if not self._base.is_called(request.base_model):
            raise ApiError(
                409,
                f"This server's base model is {self._base.name!r}, not {request.base_model!r}: register with that one, "
                f"or start a server with --model {request.base_model}.",
                "base_model",
                "model_conflict",
            )

    def _new_folder(self, facts: ModelFacts) -> Path:
        if facts.project in RESERVED_PROJECTS:
            raise ApiError(
                400, f"A project cannot be called {facts.project!r}: the server keeps a file there.", "project"
            )
        return self._root / facts.project / "models" / facts.name

    async def fork(self, source: str, request: ForkRequest) -> ModelState:
        """Make a model that starts as a copy of a step of another. Raises ApiError 404, 409."""
        origin = self.model(source)
        if request.name in self._models or request.name in self._elsewhere:
            raise ApiError(
                409, f"There is a model {request.name!r} already; fork under another name.", "name", "model_conflict"
            )
        async with self.lease(source if request.from_step is None else name_at(source, request.from_step)) as route:
            start = origin.checkpoints[route.step] if route.step else None
            project = request.project or origin.facts.project
            facts = origin.facts.model_copy(update={"name": request.name, "project": project})
            folder = self._new_folder(facts)
            await asyncio.to_thread(checkpoints.copy_model, folder, facts, start)
        copied = await asyncio.to_thread(checkpoints.scan, folder / "checkpoints")
        self._models[request.name] = model = Model(folder, facts, copied)
        return model.state()

    async def advance(self, name: str, step: int) -> str | None:
        """Take the learner's new checkpoint into use: loaded first, then `name` means it. A sampler that cannot load
        it now is asked again by the next call; returns its reason. Raises EngineError for a checkpoint that is broken."""
        model = self.model(name)
        try:
            checkpoint = checkpoint_files.read(checkpoint_files.path_of(model.checkpoint_folder, step), contents=False)
        except EngineError as error:
            raise EngineError(f"The learner's checkpoint cannot be used: {error}") from error
        problem = None
        try:
            await self._load(name_at(name, step), checkpoint)
        except EngineError as error:
            problem = str(error)
            log.error("Step %d of %s was saved, but is not loaded yet: %s", step, name, error)
        model.checkpoints[step] = checkpoint
        return problem

    async def delete_checkpoint(self, name: str, step: int) -> None:
        """Remove from routing, wait for its calls, unload, delete. Raises ApiError: 404, and 409 for the newest."""
        model = self.model(name)
        route = self._at(model, step)
        if step == model.step:
            raise ApiError(
                409, f"Step {step} is the newest of {name!r} and is never deleted.", "step", "newest_checkpoint"
            )
        if step == 0:
            raise ApiError(409, "Step 0 is the base model; it has no checkpoint to delete.", "step", "no_checkpoint")
        checkpoint = model.checkpoints.pop(step)
        try:
            async with self._returned:
                await self._returned.wait_for(lambda: not self._leases[route.adapter])
            async with self._loading[route.adapter]:
                await self._sampler.unload(route.adapter)
                await asyncio.to_thread(checkpoints.delete, checkpoint)
        except BaseException:
            if checkpoint.path.is_dir():
                model.checkpoints[step] = checkpoint
            raise

    def applied(self, name: str, request_id: str) -> Checkpoint | None:
        """The checkpoint that a train request made, also when it is saved and not yet in use."""
        model = self.model(name)
        for checkpoint in model.checkpoints.values():
            if checkpoint.note.request_id == request_id:
                return checkpoint
        try:
            path = checkpoint_files.path_of(model.checkpoint_folder, model.step + 1)
            newest = checkpoint_files.read(path, contents=False)
        except EngineError:
            return None  # nothing there: the usual answer
        return newest if newest.note.request_id == request_id else None
