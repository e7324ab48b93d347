"""Creates models: registered at step 0, or forked from a step of another model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from offbook.base.config import MAX_RANK, LoraOptions
from offbook.base.schema_patterns import SlowPatternError, full_match, pattern_time
from offbook.base.text import CLOSE_NAME
from offbook.base.wire import ForkRequest, ModelState, RegisterRequest

from ..errors import ApiError, shortened
from . import checkpoints
from .checkpoints import ModelFacts, has_checkpoints
from .leases import AdapterLeases
from .registry import ModelRegistry, ServedModel

RESERVED_PROJECTS = frozenset({"exports", "jobs", "key", "logs", "records.db", "server.json", "server.lock"})
"""Names of the server's own files and folders, which lie beside the projects' folders."""


ALL_LINEAR = "all-linear"
"""The value of `target_modules` that means all linear layers but the output layer."""


def check_target_modules(target_modules: str | Sequence[str], layers: Sequence[str]) -> None:
    """Check that every name matches one of the base's linear `layers`, by PEFT's rules: a text is a regular expression for
    whole names, and an item of a list is a name or the end of one. PEFT itself ignores an item that matches nothing.
    Raises ApiError 400. Without `layers`, which are unknown then, checks nothing."""
    if not layers:
        return
    if isinstance(target_modules, str):
        try:
            with pattern_time():
                if any(full_match(target_modules, layer) for layer in layers):
                    return
            problem = f"the regular expression {target_modules!r} matches no linear layer"
        except SlowPatternError as error:
            problem = str(error)
        except ValueError as error:
            problem = f"{target_modules!r} is no regular expression ({error})"
        wrong = [target_modules]
    else:
        wrong = [name for name in target_modules if not any(f".{layer}".endswith(f".{name}") for layer in layers)]
        problem = f"{', '.join(map(repr, wrong))} matches no linear layer"
    if not wrong:
        return
    kinds = sorted({layer.rpartition(".")[2] for layer in layers})
    close = get_close_matches(wrong[0], kinds, 1, CLOSE_NAME)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ApiError(
        400,
        f"lora.target_modules: {problem} of the base{hint or '.'} Its linear layers are {', '.join(kinds)}; {ALL_LINEAR!r} takes all",
        "lora.target_modules",
        "invalid_value",
    )


class ModelRegistration:
    """Creates models under `root`. The rank of their adapters is at most `max_rank`."""

    def __init__(self, root: Path, registry: ModelRegistry, leases: AdapterLeases, max_rank: int = MAX_RANK) -> None:
        self._root = root
        self._registry = registry
        self._leases = leases
        self._max_rank = max_rank

    def register(self, request: RegisterRequest, in_training: bool = False) -> ModelState:
        """Create a model, or return the existing one of that name.

        A new LoRA shape replaces the old one until the model is `in_training` or has a step. Raises ApiError 409 for
        another base model, project or (later) LoRA shape, and 400 for a LoRA rank above the limit.
        """
        self._check_base(request)
        if request.lora is not None and request.lora.r > self._max_rank:
            raise ApiError(
                400,
                f"lora.r {request.lora.r} is above this server's --max-lora-rank {self._max_rank}: start it with "
                f"--max-lora-rank {request.lora.r}, or use a smaller r",
                "lora.r",
                "invalid_value",
            )
        known = self._registry.get(request.name)
        if known is None:
            return self._create(request)
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
            if known.step or in_training:
                raise ApiError(
                    409,
                    f"Model {request.name!r} has the LoRA {known.facts.lora.model_dump()}, not {request.lora.model_dump()}: "
                    "the first train request fixes it; register the model under another name.",
                    "lora",
                    "model_conflict",
                )
            known.facts = known.facts.model_copy(update={"lora": request.lora})  # such as a corrected target_modules
            checkpoints.write_facts(known.folder, known.facts)
        return known.state()

    async def fork(self, source: str, request: ForkRequest) -> ModelState:
        """Create a model as a copy of the step `request.from_step` of the model `source` (None: its newest step).

        Raises ApiError 404 for an unknown model or step, 409 if the new name exists, and OSError.
        """
        origin = self._registry.model(source)
        if self._registry.get(request.name) is not None or self._registry.on_other_base(request.name) is not None:
            raise ApiError(
                409,
                f"A model {request.name!r} exists already; use another name for the fork.",
                "name",
                "model_conflict",
            )
        name = source if request.from_step is None else origin.adapter(request.from_step)
        async with self._leases.lease(name) as route:
            start = origin.checkpoints[route.step] if route.step else None
            project = request.project or origin.facts.project
            facts = origin.facts.model_copy(update={"name": request.name, "project": project})
            folder = self._new_folder(facts.project, facts.name)
            await asyncio.to_thread(checkpoints.copy_model, folder, facts, start)
        model = ServedModel(folder, facts, await asyncio.to_thread(checkpoints.scan, folder / "checkpoints"))
        self._registry.add(model)
        return model.state()

    def _create(self, request: RegisterRequest) -> ModelState:
        facts = ModelFacts(
            name=request.name,
            project=request.project,
            base_model=self._registry.base.name,
            lora=request.lora or LoraOptions(),
        )
        model = ServedModel(self._new_folder(facts.project, facts.name), facts)
        if has_checkpoints(model.folder):
            raise ApiError(
                409,
                f"The folder {model.folder} has checkpoints, but none is whole and there is no {checkpoints.FACTS}: a new model "
                "there would start at step 0. Restore the folder from a backup, or move it elsewhere",
                "name",
                "model_damaged",
            )
        checkpoints.write_facts(model.folder, facts)
        self._registry.add(model)
        return model.state()

    def _check_base(self, request: RegisterRequest) -> None:
        other, base = self._registry.on_other_base(request.name), self._registry.base
        if other is not None:
            raise ApiError(
                409,
                f"Model {request.name!r} exists in this directory with the base model {other.base_model!r}: use another "
                "name, or a server with that --model.",
                "base_model",
                "model_conflict",
            )
        if not base.is_called(request.base_model):
            raise ApiError(
                409,
                f"This server's base model is {base.name!r}, not {shortened(request.base_model)}: register with that one, "
                "or start a server with --model and that base.",
                "base_model",
                "model_conflict",
            )

    def _new_folder(self, project: str, name: str) -> Path:
        if project in RESERVED_PROJECTS:
            raise ApiError(
                400,
                f"A project cannot be called {project!r}: the server uses this name for its own files. Use another name.",
                "project",
            )
        return self._root / project / "models" / name
