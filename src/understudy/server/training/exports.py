"""Exports of a running server: as folders on its machine, and as archives for clients elsewhere."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from pathlib import Path

from ...engine.checkpoint_files import Checkpoint
from ...engine.protocol import Failed, MergeCommand, Merged
from ...errors import EngineError
from ...types import new_id
from ...wire import ArchiveRequest, ArchiveState, ExportFormat, ExportRequest, ExportResult, name_at
from ..errors import ApiError
from ..services import Services
from .archives import archive_id
from .export_folders import new_folder, write_export
from .learner_client import LearnerClient


async def export(services: Services, name: str, step: int, request: ExportRequest) -> ExportResult:
    """Write step `step` of a model to `request.output`. Raises ApiError, EngineError, OSError."""
    output = new_folder(request.output)
    _check_step(step)
    async with services.models.leases.lease(name_at(name, step)) as route:
        checkpoint = services.models.registry.model(route.model).checkpoints[step]
        await _write(services, checkpoint, request.format, output)
    return ExportResult(path=str(output), format=request.format, step=step)


async def archive(services: Services, name: str, step: int, request: ArchiveRequest) -> ArchiveState:
    """Make the archive of step `step` of a model, if it is not there. Raises ApiError, EngineError, OSError."""
    _check_step(step)
    async with services.models.leases.lease(name_at(name, step)) as route:
        checkpoint = services.models.registry.model(route.model).checkpoints[step]
        known = archive_id(checkpoint, request.format)
        return await services.archives.make(known, lambda output: _write(services, checkpoint, request.format, output))


def _check_step(step: int) -> None:
    if step == 0:
        raise ApiError(409, "Step 0 is the base model itself; there is no LoRA to export", "step", "no_checkpoint")


async def _write(services: Services, checkpoint: Checkpoint, format: ExportFormat, output: Path) -> None:
    base, merge = services.base, partial(_merge, services.learner)
    await write_export(checkpoint, format, output, base=base.path, reference=base.reference, merge=merge)


async def _merge(learner: LearnerClient | None, checkpoint: Checkpoint, output: Path) -> None:
    if learner is None:
        raise ApiError(
            409, "This server was started with --inference-only and cannot merge", "format", "inference_only"
        )
    command = MergeCommand(request_id=new_id("merge"), adapter=checkpoint.path, output=output)
    async with aclosing(learner.run(command)) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise EngineError(f"{checkpoint.path} was not merged: {event.message}")
            if isinstance(event, Merged):
                return
    raise EngineError(f"{checkpoint.path} was not merged: the learner gave no answer")
