"""Recovers the facts of a model whose `model.json` is missing or damaged from its newest whole checkpoint."""

from __future__ import annotations

from pathlib import Path

from offbook.base.errors import EngineError

from ... import tiny
from ...engine import checkpoint_files

BUNDLED: dict[tuple[str, ...], str] = {("tiny", folder): name for name, folder in tiny.FOLDERS.items()}
"""Name of a bundled policy by the last two parts of its path. Checkpoints name the folder of their base."""


def newest_note(folder: Path) -> checkpoint_files.CheckpointNote | None:
    """The note of the newest checkpoint whose files are complete by name and size; None if there is none."""
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
