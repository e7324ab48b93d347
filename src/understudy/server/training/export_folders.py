"""Exports of checkpoints as folders, in the formats of `ExportFormat`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from ...engine.checkpoint_files import Checkpoint
from ...types import new_id
from ...wire import ExportFormat
from ..errors import ApiError
from ..models.checkpoints import export_adapter
from .gguf import make_ready

Merge = Callable[[Checkpoint, Path], Awaitable[None]]
"""Function that writes base and LoRA as one model to a new folder. Raises EngineError."""


async def write_export(
    checkpoint: Checkpoint, format: ExportFormat, output: Path, *, base: Path, reference: str, merge: Merge
) -> None:
    """Write a checkpoint to the new folder `output`, atomically.

    `base`: folder of the base model. `reference`: the `base_model_name_or_path` of a `peft` export. Raises ApiError
    409 for weights that float16 cannot hold, EngineError if merging fails, and OSError.
    """
    if format == "peft":
        await asyncio.to_thread(export_adapter, checkpoint, output, reference)
    elif format == "merged":
        await merge(checkpoint, output)
    else:
        await _gguf_ready(checkpoint, output, base, merge)


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


async def _gguf_ready(checkpoint: Checkpoint, output: Path, base: Path, merge: Merge) -> None:
    """Merge beside `output`, convert for llama.cpp, and rename to `output`."""
    scratch = output.with_name(f".{output.name}.{new_id('gguf')}")
    try:
        await merge(checkpoint, scratch)
        await asyncio.to_thread(make_ready, scratch, base)
        scratch.rename(output)
    except ValueError as error:
        raise ApiError(409, f"{checkpoint.path} cannot be exported: {error}", "format", "beyond_float16") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already renamed, or incomplete
