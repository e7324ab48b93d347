"""`python -m offbook.server checkpoints|export`: the checkpoints of a server's directory, read without a server.

The directory is neither locked nor changed. A server may run on it, since checkpoint folders appear atomically.
Imports no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

from offbook.base.errors import ConfigError, EngineError
from offbook.base.wire import CheckpointState, ExportFormat, ExportResult

from ..engine import checkpoint_files
from ..engine.checkpoint_files import Checkpoint
from ..engine.protocol import MERGE_MODULE
from .models.base_model import find, reference
from .models.checkpoints import ModelFacts, scan_models, state_of
from .training.export_folders import new_folder, write_export

logger = logging.getLogger(__name__)

_STATES = TypeAdapter(list[CheckpointState])


def answer(argv: Sequence[str]) -> str:
    """Run a command and return its result as JSON: list[CheckpointState] for `checkpoints`, ExportResult for `export`.

    Raises ConfigError, EngineError, ApiError, OSError.
    """
    arguments = _parse(argv)
    folder, facts = find_model(arguments.dir, arguments.model)
    if arguments.command == "checkpoints":
        return _STATES.dump_json(checkpoint_states(folder)).decode()
    checkpoints = {checkpoint.step: checkpoint for checkpoint in _whole(folder)}
    if not checkpoints:
        raise ConfigError(
            f"model {facts.name!r} is at step 0: nothing has been trained yet, so there is no LoRA to export"
        )
    step = max(checkpoints) if arguments.step is None else arguments.step
    if step not in checkpoints:
        steps = ", ".join(str(number) for number in sorted(checkpoints))
        raise ConfigError(f"--step: model {facts.name!r} has no step {step}; it has {steps}")
    return asyncio.run(_export(facts, checkpoints[step], arguments.format, arguments.output)).model_dump_json()


def checkpoint_states(folder: Path) -> list[CheckpointState]:
    """The whole checkpoints in a model's folder, by step. Damaged ones are logged."""
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

    async def merge(checkpoint: Checkpoint, output: Path) -> None:
        words = ["--base", str(base), "--adapter", str(checkpoint.path), "--output", str(output)]
        finished = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", MERGE_MODULE, *words],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if finished.returncode != 0:
            why = finished.stderr.strip().splitlines()[-1:] or [f"exit code {finished.returncode}"]
            raise EngineError(f"{checkpoint.path} was not merged: {why[0]}")

    try:
        await write_export(checkpoint, format, folder, base=base, reference=reference(facts.base_model), merge=merge)
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error.strerror or error}") from error
    return ExportResult(path=str(folder), format=format, step=checkpoint.step)


def _warn(path: Path, error: EngineError) -> None:
    logger.warning("Skipping checkpoint %s: %s", path.name, error)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m offbook.server", allow_abbrev=False)
    parser.add_argument("command", choices=("checkpoints", "export"))
    parser.add_argument("model")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--output")
    parser.add_argument("--format", choices=get_args(ExportFormat), default="peft")
    parser.add_argument("--step", type=int)
    arguments = parser.parse_args(argv)
    if arguments.command == "export" and arguments.output is None:
        parser.error("export needs --output")
    return arguments
