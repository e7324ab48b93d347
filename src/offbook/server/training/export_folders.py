"""Exports of checkpoints as folders, in the formats of `ExportFormat`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from offbook.base.types import new_id
from offbook.base.wire import ExportFormat, ExportResult

from ...engine.checkpoint_files import Checkpoint
from ...engine.protocol import Merged
from ..errors import ApiError
from ..models.checkpoints import export_adapter

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""An export is for other programs and accounts, unlike the server's directory, whose umask the files are written with."""
Merge = Callable[[Checkpoint, Path, bool], Awaitable[Merged]]
"""Function that writes base and LoRA as one model to a new folder; with True, for llama.cpp's converter. Raises ApiError
409 for weights that float16 cannot hold, EngineError."""


async def write_export(
    checkpoint: Checkpoint, format: ExportFormat, output: Path, *, reference: str, merge: Merge
) -> ExportResult:
    """Write a checkpoint to the new folder `output`, atomically.

    `reference`: the `base_model_name_or_path` of a `peft` export. Raises what `merge` raises, and OSError.
    """
    scratch = output.with_name(f".{output.name}.{new_id('export')}")
    merged: Merged | None = None
    try:
        if format == "peft":
            await asyncio.to_thread(export_adapter, checkpoint, scratch, reference)
        else:
            merged = await merge(checkpoint, scratch, format == "gguf-ready")
        for path in (scratch, *scratch.rglob("*")):
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)
        scratch.rename(output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already renamed, or incomplete
    facts = (merged.note, merged.adapter_kept) if merged is not None else ("", None)
    return ExportResult(path=str(output), format=format, step=checkpoint.step, note=facts[0], adapter_kept=facts[1])


def new_folder(output: str) -> Path:
    """Check the folder that a request names. Raises ApiError 400 for a relative path and 409 for an existing one."""
    path = Path(output)
    if output.startswith("~/"):
        path = path.expanduser()
    if not path.is_absolute() or "\0" in output:
        raise ApiError(400, f"output must be an absolute path on the server's machine, got {output!r}", "output")
    try:
        exists = path.exists()
    except OSError as error:
        raise ApiError(
            400, f"output {output!r} cannot be a folder: {error.strerror}", "output", "invalid_value"
        ) from error
    if exists:
        raise ApiError(409, f"output {path} exists already; name a new folder", "output", "output_exists")
    return path
