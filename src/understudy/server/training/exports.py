"""Checkpoints as folders that other programs load: the LoRA alone, merged into its base, or that for llama.cpp."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path

from ...engine.checkpoint_files import Checkpoint
from ...engine.protocol import Failed, MergeCommand, Merged
from ...errors import EngineError
from ...types import new_id
from ...wire import ExportRequest, ExportResult, name_at
from ..errors import ApiError
from ..models.checkpoints import export_adapter
from ..services import Services
from .gguf import make_ready


async def export(services: Services, name: str, step: int, request: ExportRequest) -> ExportResult:
    """Write step `step` of a model to `request.output`. Raises ApiError, EngineError, OSError."""
    output = Path(request.output)
    if request.output.startswith("~/"):
        output = output.expanduser()
    if not output.is_absolute() or "\0" in request.output:
        raise ApiError(
            400, f"output must be an absolute path on the server's machine, not {request.output!r}", "output"
        )
    if output.exists():
        raise ApiError(409, f"output {output} exists already; name a new folder", "output", "output_exists")
    if step == 0:
        raise ApiError(409, "Step 0 is the base model itself; there is no LoRA to export", "step", "no_checkpoint")
    async with services.models.leases.lease(name_at(name, step)) as route:
        checkpoint = services.models.registry.model(route.model).checkpoints[step]
        if request.format == "peft":
            await asyncio.to_thread(export_adapter, checkpoint, output, services.base.reference)
        elif request.format == "merged":
            await _merge(services, checkpoint, output)
        else:
            await _gguf_ready(services, checkpoint, output)
    return ExportResult(path=str(output), format=request.format, step=step)


async def _merge(services: Services, checkpoint: Checkpoint, output: Path) -> None:
    if services.learner is None:
        raise ApiError(
            409, "This server was started with --inference-only and cannot merge", "format", "inference_only"
        )
    command = MergeCommand(request_id=new_id("merge"), adapter=checkpoint.path, output=output)
    async with aclosing(services.learner.run(command)) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise EngineError(f"{checkpoint.path} was not merged: {event.message}")
            if isinstance(event, Merged):
                return
    raise EngineError(f"{checkpoint.path} was not merged: the learner gave no answer")


async def _gguf_ready(services: Services, checkpoint: Checkpoint, output: Path) -> None:
    """Merged beside `output`, made ready, and renamed: it appears whole."""
    scratch = output.with_name(f".{output.name}.{new_id('gguf')}")
    try:
        await _merge(services, checkpoint, scratch)
        await asyncio.to_thread(make_ready, scratch, services.base.path)
        scratch.rename(output)
    except ValueError as error:
        raise ApiError(409, f"{checkpoint.path} was not exported: {error}", "format", "beyond_float16") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already renamed, or half written and of no use
