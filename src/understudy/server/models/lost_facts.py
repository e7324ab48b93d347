"""A model whose `model.json` is lost or cut: its facts as its newest whole checkpoint tells them."""

from __future__ import annotations

from pathlib import Path

from ...engine import checkpoint_files
from ...errors import EngineError

TINY = ("tiny", "policy")
"""Where the bundled policy lies in any installation: checkpoints name its folder."""


def newest_note(folder: Path) -> checkpoint_files.CheckpointNote | None:
    """The note of a model folder's newest checkpoint that is whole but for its contents, which are not read."""
    checkpoints = folder / "checkpoints"
    for step in checkpoint_files.steps(checkpoints):
        try:
            return checkpoint_files.read(checkpoint_files.path_of(checkpoints, step), contents=False).note
        except EngineError:
            continue  # whoever reads the checkpoints names it
    return None


def base_name(note: checkpoint_files.CheckpointNote) -> str:
    """What the model's base was called when it was registered."""
    return "tiny" if Path(note.base_model).parts[-2:] == TINY else note.base_model


def has_checkpoints(folder: Path) -> bool:
    """Whether there are checkpoints, whole or damaged."""
    checkpoints = folder / "checkpoints"
    return checkpoints.is_dir() and any(path.name[:1].isdigit() for path in checkpoints.iterdir())
