"""Models and checkpoints on disk: `{dir}/{project}/models/{name}/checkpoints/{n:04d}/`. The folders are the truth."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ...config import LoraOptions, Name
from ...engine import checkpoint_files
from ...engine.checkpoint_files import ADAPTER, ADAPTER_CONFIG, NOTE, Checkpoint, sync
from ...errors import EngineError
from ...types import Json
from ...wire import CheckpointState

log = logging.getLogger(__name__)

FACTS = "model.json"
_DELETING = ".deleting-"


class ModelFacts(BaseModel):
    """`model.json`: what is fixed when a model is registered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    project: Name
    base_model: str
    lora: LoraOptions


def scan(folder: Path) -> dict[int, Checkpoint]:
    """The whole checkpoints of a model by step. Scratch folders are ignored, leftovers of a deletion removed, damaged
    checkpoints put aside and named in the log. Reads every byte of the newest one."""
    for leftover in folder.glob(f"{_DELETING}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # a deletion that a crash cut short; tried again next time
    return {checkpoint.step: checkpoint for checkpoint in checkpoint_files.whole(folder, _put_aside)}


def state_of(checkpoint: Checkpoint) -> CheckpointState:
    """A checkpoint as clients see it; metrics that are not finite stay in its file."""
    note = checkpoint.note
    return CheckpointState(
        step=checkpoint.step,
        path=str(checkpoint.path),
        created_at=note.created_at,
        request_id=note.request_id,
        metrics={name: value for name, value in note.metrics.items() if math.isfinite(value)},
    )


def _put_aside(path: Path, error: EngineError) -> None:
    aside = checkpoint_files.put_aside(path)
    log.error("Put aside as %s, and passed over: %s. The model goes on from its newest whole step", aside, error)


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
    """Replace a file, whole or not at all, also for several writers at once: the last one's text stays. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)


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
            sync(copy.parent)
        scratch.rename(folder)
        sync(folder.parent)
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
        for name in (ADAPTER_CONFIG, ADAPTER):
            shutil.copy2(checkpoint.path / name, scratch / name)
        config = json.loads((scratch / ADAPTER_CONFIG).read_text("utf-8"))
        config["base_model_name_or_path"] = reference
        write_text(scratch / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")
        scratch.rename(output)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _copy_synced(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    sync(Path(target))
