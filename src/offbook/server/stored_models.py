"""A server's directory without its server: its records and checkpoints are read, exported and imported.

Only an import locks and changes it. A server may run on it otherwise, since checkpoint folders appear atomically. Imports no
torch.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

from offbook.base.child_processes import last_line
from offbook.base.errors import ConfigError, EngineError, OffbookError
from offbook.base.wire import CheckpointState, ExportFormat, ExportResult, ModelRecords, RolloutTrace, TrajectoryQuery

from ..engine import checkpoint_files
from ..engine.checkpoint_files import Checkpoint, make_folder, path_of, read, sync
from ..engine.protocol import IMPORT_MODULE, MERGE_MODULE, Merged
from .base_model import BaseModelPath, find, reference
from .directory_lock import DirectoryLock, make_private
from .models.checkpoints import ModelFacts, base_name, scan_models, state_of, write_facts
from .records.call_rows import trace_page
from .records.database import RECORDS, fault_of, open_records
from .records.overview import model_logs
from .records.store import create_file
from .training.archives import new_folder, write_export

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


def import_model(root: Path, adapter: Path, model: str, project: str, base_model: str) -> Path:
    """Create `model` with the adapter as its step 1, and return the checkpoint's folder. The base is loaded in a process
    of its own. Raises ConfigError for a name that is
    taken, a running server, and an adapter that does not fit the base."""
    base = find(base_model)
    make_private(root)
    lock = DirectoryLock(root)
    try:
        if any(facts.name == model for _, facts in scan_models(root)):
            raise ConfigError(f"there is a model {model!r} in {root} already: use another --model")
        records = root / RECORDS
        if not records.exists() and fault_of(records, None) is None:
            create_file(records)  # a server takes checkpoints without records for a loss
        folder = root / project / "models" / model
        _import_adapter(folder, adapter, model, project, base)
        return path_of(folder / "checkpoints", 1)
    finally:
        lock.release()


def _import_adapter(folder: Path, adapter: Path, model: str, project: str, base: BaseModelPath) -> None:
    """Create the model's `folder`, atomically. Raises ConfigError for an adapter that does not fit the base, OSError."""
    make_folder(folder.parent)
    scratch = folder.with_name(f".fork-{folder.name}")  # a start removes what a kill leaves
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        places = {"base": base.path, "adapter": adapter, "checkpoints": scratch / "checkpoints"}
        words = [word for name, place in places.items() for word in (f"--{name}", str(place))]
        done = subprocess.run(
            [sys.executable, "-m", IMPORT_MODULE, "--name", base.reference, "--model", model, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode:
            last = last_line(done.stderr) or f"the process ended with code {done.returncode}"
            raise ConfigError(f"{adapter} was not imported: {done.stdout or last}")
        note = read(path_of(scratch / "checkpoints", 1)).note
        write_facts(scratch, ModelFacts(name=model, project=project, base_model=base_name(note), lora=note.lora))
        scratch.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class DirectoryRecords:
    """Reads a server's directory, on which a server may run. Raises ConfigError for a folder without records, StoreError."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder

    async def rollouts(self, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
        """The rollouts that match the query, on all pages, the last finished first."""
        records = open_records(self._folder, briefly=True)
        try:
            while True:
                page = await records.read(partial(trace_page, query=query))
                for rollout in page.rollouts:
                    yield rollout
                if page.next is None:
                    return
                query = query.model_copy(update={"after": page.next})
        finally:
            records.close()

    async def models(self) -> list[ModelRecords]:
        """All models of the directory, with their checkpoints and logs."""
        records = open_records(self._folder, briefly=True)
        try:
            return [
                ModelRecords(
                    name=facts.name,
                    checkpoints=tuple(checkpoint_states(folder)),
                    logs=tuple(await records.read(partial(model_logs, model=facts.name))),
                )
                for folder, facts in scan_models(self._folder)
            ]
        finally:
            records.close()
