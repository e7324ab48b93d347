"""Models and checkpoints on disk: `{dir}/{project}/models/{name}/checkpoints/{n:04d}/`. The folders are the truth."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...config import LoraOptions, Name
from ...types import Json, TrainResult
from ...wire import CheckpointState

log = logging.getLogger(__name__)

FACTS = "model.json"
NOTE = "understudy.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_DELETING = ".deleting-"


class ModelFacts(BaseModel):
    """`model.json`: what is fixed when a model is registered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    project: Name
    base_model: str
    lora: LoraOptions


class CheckpointNote(BaseModel):
    """What the server reads of a checkpoint's `understudy.json`; the learner keeps more in it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    step: int = Field(ge=1)
    request_id: str | None = None
    model: str
    metrics: dict[str, float] = Field(default_factory=dict)
    result: TrainResult | None = None
    created_at: float
    sizes: dict[str, int] = Field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    note: CheckpointNote

    @property
    def step(self) -> int:
        return self.note.step

    def state(self) -> CheckpointState:
        """As the wire shows it; metrics that are no finite numbers stay in the file."""
        metrics = {name: value for name, value in self.note.metrics.items() if math.isfinite(value)}
        return CheckpointState(
            step=self.step,
            path=str(self.path),
            created_at=self.note.created_at,
            request_id=self.note.request_id,
            metrics=metrics,
        )

    def result(self) -> TrainResult | None:
        """The result of the train request that made it, with the folder's present place."""
        result = self.note.result
        return result.model_copy(update={"checkpoint": str(self.path)}) if result is not None else None


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder named by its step. Raises ValueError saying what is wrong with it."""
    missing = [name for name in (NOTE, *ADAPTER_FILES) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {' and no '.join(missing)}")
    try:
        note = CheckpointNote.model_validate(json.loads((folder / NOTE).read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / NOTE} cannot be read: {error}") from error
    for name, size in note.sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise ValueError(f"{folder / name} has {found or 'no'} bytes, {size} were written")
    if note.step != int(folder.name):
        raise ValueError(f"{folder} says that it is step {note.step}")
    return Checkpoint(folder, note)


def scan(checkpoints: Path) -> dict[int, Checkpoint]:
    """The complete checkpoints of a model by step. Scratch folders are ignored, leftovers of a deletion removed,
    broken checkpoints put aside as `{n}.broken` and named in the log."""
    found: dict[int, Checkpoint] = {}
    if not checkpoints.is_dir():
        return found
    for folder in sorted(checkpoints.iterdir()):
        if folder.name.startswith(_DELETING):
            shutil.rmtree(folder, ignore_errors=True)  # a deletion that a crash cut short; tried again next time
        elif folder.is_dir() and folder.name.isdecimal():
            try:
                checkpoint = read(folder)
            except ValueError as error:
                aside = _aside(folder)
                folder.rename(aside)
                log.error("A checkpoint is broken and was put aside as %s: %s", aside, error)
            else:
                found[checkpoint.step] = checkpoint
    return found


def scan_models(root: Path) -> list[tuple[Path, ModelFacts]]:
    """Every model under `{dir}`; a folder whose model.json cannot be read is named in the log."""
    found: list[tuple[Path, ModelFacts]] = []
    for path in sorted(root.glob(f"*/models/*/{FACTS}")):
        if path.parent.name.startswith("."):
            continue
        try:
            facts = ModelFacts.model_validate(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError) as error:
            reason = str(error) if not isinstance(error, ValidationError) else f"{error.error_count()} bad fields"
            log.error("The model at %s is ignored, its %s cannot be read: %s", path.parent, FACTS, reason)
            continue
        found.append((path.parent, facts))
    return found


def write_facts(folder: Path, facts: ModelFacts) -> None:
    """Write `model.json` durably. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FACTS, facts.model_dump_json(indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file, whole or not at all. Raises OSError."""
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    _sync(path.parent)


def copy_model(folder: Path, facts: ModelFacts, start: Checkpoint | None) -> None:
    """Make a model's folder whose only checkpoint is a copy of `start`; appears whole or not at all. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".fork-{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)  # of a fork that a crash cut short
    try:
        write_facts(scratch, facts)
        if start is not None:
            copy = scratch / "checkpoints" / start.path.name
            shutil.copytree(start.path, copy, copy_function=_copy_synced)
            note: dict[str, Json] = json.loads((copy / NOTE).read_text("utf-8"))
            origin = {"model": note["model"], "step": start.step}
            made: dict[str, Json] = note.get("result") or {}
            result = made | {"model": facts.name, "request_id": ""}
            note |= {"model": facts.name, "request_id": None, "result": result, "forked_from": origin}
            write_text(copy / NOTE, json.dumps(note, indent=2) + "\n")
            _sync(copy.parent)
        scratch.rename(folder)
        _sync(folder.parent)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def delete(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint's folder: gone from its name at once. Raises OSError."""
    doomed = checkpoint.path.with_name(f"{_DELETING}{checkpoint.path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.path.rename(doomed)
    shutil.rmtree(doomed)


def export_adapter(checkpoint: Checkpoint, output: Path, reference: str) -> None:
    """Copy the PEFT files to a new folder, with the base that `AutoPeftModel` shall load. Raises OSError."""
    scratch = output.with_name(f".{output.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        for name in ADAPTER_FILES:
            shutil.copy2(checkpoint.path / name, scratch / name)
        config = json.loads((scratch / ADAPTER_FILES[0]).read_text("utf-8"))
        config["base_model_name_or_path"] = reference
        write_text(scratch / ADAPTER_FILES[0], json.dumps(config, indent=2) + "\n")
        scratch.rename(output)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _aside(folder: Path) -> Path:
    number = 0
    while True:
        aside = folder.with_name(f"{folder.name}.broken{f'-{number}' if number else ''}")
        if not aside.exists():
            return aside
        number += 1


def _copy_synced(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    _sync(Path(target))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
