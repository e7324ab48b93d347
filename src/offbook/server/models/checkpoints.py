"""Models and checkpoints on disk: `{dir}/{project}/models/{name}/checkpoints/{n:04d}/`.

The folders are authoritative: the server reads them at start, and no database repeats them. A model's lost facts are
recovered from its newest whole checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from offbook.base.config import LoraOptions, Name
from offbook.base.errors import EngineError, OffbookError, StoreError
from offbook.base.json_files import read_json
from offbook.base.types import Json
from offbook.base.wire import CheckpointState

from ... import tiny
from ...engine import checkpoint_files
from ...engine.checkpoint_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    NOTE,
    Checkpoint,
    is_file,
    make_folder,
    not_checked,
    sync,
    write_bytes,
)

logger = logging.getLogger(__name__)

BUNDLED: dict[tuple[str, ...], str] = {("tiny", folder): name for name, folder in tiny.FOLDERS.items()}
"""Name of a bundled policy by the last two parts of its path. Checkpoints name the folder of their base."""


def newest_note(folder: Path) -> checkpoint_files.CheckpointNote | None:
    """The note of the newest checkpoint whose files are complete by name and size; None if there is none.

    Raises StoreError if a checkpoint cannot be read.
    """
    checkpoints = folder / "checkpoints"
    for step in checkpoint_files.steps(checkpoints):
        try:
            return checkpoint_files.read(checkpoint_files.path_of(checkpoints, step), contents=False).note
        except EngineError:
            continue  # `scan` reports it
    return None


def base_name(note: checkpoint_files.CheckpointNote) -> str:
    """The `base_model` with which the checkpoint's model was registered.

    The note of a bundled policy has a path like /usr/lib/python3/site-packages/offbook/tiny/policy; its name is
    "tiny".
    """
    return BUNDLED.get(Path(note.base_model).parts[-2:], note.base_model)


def has_checkpoints(folder: Path) -> bool:
    """Whether a model's folder has checkpoints, whole or damaged."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.name[:1].isdigit() for path in checkpoints.iterdir())


FACTS = "model.json"
"""File with a model's ModelFacts."""
_DELETING = ".deleting-"


class ModelFacts(BaseModel):
    """The content of `model.json`: what is fixed when a model is registered."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    name: Name
    project: Name
    base_model: str
    lora: LoraOptions


def scan(folder: Path) -> dict[int, Checkpoint]:
    """The whole checkpoints in a model's checkpoint folder, by step.

    Ignores unfinished ones, completes interrupted deletions, and renames damaged checkpoints, with a line in the log.
    Verifies all bytes of the newest checkpoint only. Raises StoreError if a checkpoint cannot be read.
    """
    for leftover in folder.glob(f"{_DELETING}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # the next start retries what fails here
    return {checkpoint.step: checkpoint for checkpoint in checkpoint_files.whole(folder, _put_aside)}


def state_of(checkpoint: Checkpoint) -> CheckpointState:
    """A checkpoint as clients see it, without metrics that are not finite, since JSON cannot carry them."""
    note = checkpoint.note
    return CheckpointState(
        step=checkpoint.step,
        path=str(checkpoint.path),
        created_at=note.created_at,
        request_id=note.request_id,
        metrics={name: value for name, value in note.metrics.items() if math.isfinite(value)},
        size=sum(note.sizes.values()),
    )


def _put_aside(path: Path, error: OffbookError) -> None:
    if isinstance(error, StoreError):
        raise error
    renamed = checkpoint_files.put_aside(path)
    logger.error(
        "A damaged checkpoint was set aside as %s: %s. The model continues from its newest whole step", renamed, error
    )


def scan_models(root: Path, *, mend: bool = False) -> list[tuple[Path, ModelFacts]]:
    """The folder and the facts of every model under `root`, a server's directory.

    If model.json is missing or damaged, its content comes from the newest checkpoint, with a line in the log; `mend`
    also writes the file again. A model without model.json and whole checkpoints is left out and logged. Raises StoreError
    if a file cannot be read.
    """
    models: list[tuple[Path, ModelFacts]] = []
    for folder in sorted(path for path in root.glob("*/models/*") if path.is_dir()):
        if folder.name.startswith("."):
            continue
        try:
            facts = read_facts(folder)
        except (FileNotFoundError, ValueError) as error:
            facts = _mended(folder, error, mend=mend)
        except OSError as error:
            raise not_checked(folder / FACTS, error) from error
        if facts is not None:
            models.append((folder, facts))
    return models


def read_facts(folder: Path) -> ModelFacts:
    """Read `model.json` of a model's folder. Raises OSError, and ValueError for a damaged file."""
    if (folder / FACTS).exists() and not is_file(folder / FACTS):
        raise ValueError("it is not a regular file")
    return ModelFacts.model_validate(read_json(folder / FACTS))


def recovered_facts(folder: Path) -> ModelFacts | None:
    """The facts according to the newest whole checkpoint; None if there is none."""
    note = newest_note(folder)
    if note is None:
        return None
    try:
        return ModelFacts(
            name=folder.name, project=folder.parent.parent.name, base_model=base_name(note), lora=note.lora
        )
    except ValidationError:
        return None  # not a folder that a server created


def _mended(folder: Path, error: FileNotFoundError | ValueError, *, mend: bool) -> ModelFacts | None:
    reason = str(error) if not isinstance(error, ValidationError) else f"{error.error_count()} bad fields"
    facts = recovered_facts(folder)
    if facts is None:
        if has_checkpoints(folder) or (folder / FACTS).exists():
            logger.error(
                "Ignoring the model at %s: its %s cannot be read, and no checkpoint is whole: %s", folder, FACTS, reason
            )
        return None
    logger.error(
        "%s of the model at %s cannot be read (%s); using what its newest checkpoint says: %s",
        FACTS,
        folder,
        reason,
        facts,
    )
    if mend:
        if (folder / FACTS).exists():
            checkpoint_files.put_aside(folder / FACTS)
        write_facts(folder, facts)
    return facts


def write_facts(folder: Path, facts: ModelFacts) -> None:
    """Write `model.json` durably. Raises OSError."""
    make_folder(folder)
    write_text(folder / FACTS, facts.model_dump_json(indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def copy_model(folder: Path, facts: ModelFacts, start: Checkpoint | None) -> None:
    """Create a model's folder atomically, with a copy of `start` as its only checkpoint (None: at step 0).

    The copy's note names the new model and, as `forked_from`, the old one. Raises OSError.
    """
    make_folder(folder.parent)
    scratch = folder.with_name(f".fork-{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)  # of an interrupted fork
    try:
        write_facts(scratch, facts)
        if start is not None:
            _copy_checkpoint(start, scratch / "checkpoints" / start.path.name, facts.name, start.step)
            sync(scratch / "checkpoints")
            sync(scratch)
        scratch.rename(folder)
        sync(folder.parent)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def copy_step(folder: Path, start: Checkpoint, model: str, step: int) -> None:
    """Create checkpoint `step` of a model in its checkpoints' `folder`, atomically, as a copy of `start`. Raises OSError."""
    scratch = folder / f".copy-{step}"
    shutil.rmtree(scratch, ignore_errors=True)  # of an interrupted copy
    make_folder(folder)
    try:
        _copy_checkpoint(start, scratch, model, step)
        scratch.rename(checkpoint_files.path_of(folder, step))
        sync(folder)
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _copy_checkpoint(start: Checkpoint, copy: Path, model: str, step: int) -> None:
    shutil.copytree(start.path, copy, copy_function=_copy_synced)
    note: dict[str, Json] = read_json(copy / NOTE)
    origin = {"model": note["model"], "step": start.step}
    stored: dict[str, Json] = note.get("result") or {}
    result = stored | {"model": model, "step": step, "request_id": ""}
    note |= {"model": model, "step": step, "request_id": None, "result": result, "forked_from": origin}
    write_text(copy / NOTE, json.dumps(note, indent=2) + "\n")


def delete(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint's folder.

    It is renamed first, so that a crash leaves no partial checkpoint. Raises OSError.
    """
    leftover = checkpoint.path.with_name(f"{_DELETING}{checkpoint.path.name}")
    shutil.rmtree(leftover, ignore_errors=True)
    checkpoint.path.rename(leftover)
    shutil.rmtree(leftover)


def export_adapter(checkpoint: Checkpoint, output: Path, reference: str) -> None:
    """Copy a checkpoint's PEFT files to the new folder `output`. Raises OSError.

    `reference` becomes its `base_model_name_or_path`, the base that `AutoPeftModel` loads.
    """
    output.mkdir(parents=True)
    shutil.copyfile(checkpoint.path / ADAPTER, output / ADAPTER)
    config = read_json(checkpoint.path / ADAPTER_CONFIG) | {"base_model_name_or_path": reference}
    write_text(output / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def _copy_synced(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    sync(Path(target))
