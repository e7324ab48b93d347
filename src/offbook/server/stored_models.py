"""The checkpoints of a server's directory, read and exported without a server.

The directory is neither locked nor changed. A server may run on it, since checkpoint folders appear atomically.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from offbook.base.child_processes import last_line
from offbook.base.errors import ConfigError, EngineError, OffbookError
from offbook.base.wire import CheckpointState, ExportFormat, ExportResult

from ..engine import checkpoint_files
from ..engine.checkpoint_files import Checkpoint
from ..engine.protocol import MERGE_MODULE, Merged
from .models.base_model import find, reference
from .models.checkpoints import ModelFacts, scan_models, state_of
from .training.export_folders import new_folder, write_export

logger = logging.getLogger(__name__)


def checkpoints_of(root: Path, model: str) -> list[CheckpointState]:
    """The checkpoints of a model, by step. Raises ConfigError for a model that is not there."""
    folder, _ = find_model(root, model)
    return checkpoint_states(folder)


def export_checkpoint(root: Path, model: str, step: int | None, format: ExportFormat, output: str) -> ExportResult:
    """Write a checkpoint (None: the newest) to the new folder `output`. Only a merge needs torch, in a
    process of its own.

    Raises ConfigError, EngineError, ApiError.
    """
    folder, facts = find_model(root, model)
    checkpoints = {checkpoint.step: checkpoint for checkpoint in _whole(folder)}
    if not checkpoints:
        raise ConfigError(
            f"model {facts.name!r} is at step 0: nothing has been trained yet, so there is no LoRA to export"
        )
    chosen = max(checkpoints) if step is None else step
    if chosen not in checkpoints:
        steps = ", ".join(str(number) for number in sorted(checkpoints))
        raise ConfigError(f"--step: model {facts.name!r} has no step {chosen}; it has {steps}")
    return asyncio.run(_export(facts, checkpoints[chosen], format, output))


def checkpoint_states(folder: Path) -> list[CheckpointState]:
    """The whole checkpoints in a model's folder, by step. Damaged and unreadable ones are logged."""
    return sorted(map(state_of, _whole(folder)), key=lambda state: state.step)


def _whole(folder: Path) -> Iterator[Checkpoint]:
    return checkpoint_files.whole(folder / "checkpoints", _warn)


def find_model(root: Path, name: str) -> tuple[Path, ModelFacts]:
    """The folder and facts of a model. Raises ConfigError that lists the directory's models."""
    models = {facts.name: (folder, facts) for folder, facts in scan_models(root)}
    if name not in models:
        names = ", ".join(sorted(models)) or "none"
        raise ConfigError(f"there is no model {name!r} in {root} (it holds: {names}); see --dir")
    return models[name]


async def _export(facts: ModelFacts, checkpoint: Checkpoint, format: ExportFormat, output: str) -> ExportResult:
    folder = new_folder(output)
    base = find(facts.base_model).path if format != "peft" else checkpoint.path  # a peft export does not read the base

    async def merge(checkpoint: Checkpoint, output: Path, gguf: bool) -> Merged:
        words = ["--base", str(base), "--adapter", str(checkpoint.path), "--output", str(output)]
        finished = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", MERGE_MODULE, *words, *(["--gguf"] if gguf else [])],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if finished.returncode != 0:
            why = last_line(finished.stderr) or f"exit code {finished.returncode}"
            raise EngineError(f"{checkpoint.path} was not merged: {why}")
        return Merged.model_validate_json(finished.stdout.rstrip("\n").rpartition("\n")[2])

    try:
        return await write_export(checkpoint, format, folder, reference=reference(facts.base_model), merge=merge)
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error.strerror or error}") from error


def _warn(path: Path, error: OffbookError) -> None:
    logger.warning("Skipping checkpoint %s: %s", path.name, error)
