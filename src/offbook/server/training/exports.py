"""Exports of a running server: folders on its machine, and archives that clients download."""

from __future__ import annotations

import logging
from contextlib import aclosing
from functools import partial
from pathlib import Path

from offbook.base.errors import EngineError
from offbook.base.types import new_id
from offbook.base.wire import (
    ArchiveRequest,
    ArchiveState,
    ExportFormat,
    ExportRequest,
    ExportResult,
    name_at,
)

from ...engine.checkpoint_files import Checkpoint
from ...engine.protocol import Failed, MergeCommand, Merged
from ..errors import ApiError
from ..services import Services
from .archives import archive_id, new_folder, write_export
from .learner_client import LearnerClient

logger = logging.getLogger(__name__)


async def export(services: Services, name: str, step: int, request: ExportRequest) -> ExportResult:
    """Export a step of the model `name` to the folder `request.output`. Raises ApiError, EngineError, OSError."""
    output = new_folder(request.output)
    _check_step(step)
    async with services.models.leases.lease(name_at(name, step)) as route:
        checkpoint = services.models.registry.model(route.model).checkpoints[step]
        return await _write(services, checkpoint, request.format, output)


async def archive(services: Services, name: str, step: int, request: ArchiveRequest) -> ArchiveState:
    """Return the archive of a step of the model `name`; create it if necessary.

    Raises ApiError, EngineError, OSError.
    """
    _check_step(step)
    async with services.models.leases.lease(name_at(name, step)) as route:
        checkpoint = services.models.registry.model(route.model).checkpoints[step]
        name_of_archive = archive_id(checkpoint, request.format)

        async def write(output: Path) -> str:
            return (await _write(services, checkpoint, request.format, output)).note

        return await services.archives.make(name_of_archive, write)


def _check_step(step: int) -> None:
    if step == 0:
        raise ApiError(409, "Step 0 is the base model itself; it has no LoRA to export", "step", "no_checkpoint")


async def _write(services: Services, checkpoint: Checkpoint, format: ExportFormat, output: Path) -> ExportResult:
    merge = partial(_merge, services.learner)
    result = await write_export(checkpoint, format, output, reference=services.base.reference, merge=merge)
    if result.note:
        logger.info("Export of %s, step %d: %s", checkpoint.note.model, checkpoint.step, result.note)
    return result


async def _merge(learner: LearnerClient | None, checkpoint: Checkpoint, output: Path, gguf: bool) -> Merged:
    if learner is None:
        raise ApiError(
            409,
            "This server was started with --inference-only, so it cannot merge: export with format peft",
            "format",
            "inference_only",
        )
    command = MergeCommand(request_id=new_id("merge"), adapter=checkpoint.path, output=output, gguf=gguf)
    async with aclosing(learner.run(command)) as events:
        async for event in events:
            if isinstance(event, Failed) and event.reason == "bad_job":
                raise ApiError(
                    409, f"{checkpoint.path} cannot be exported: {event.message}", "format", "not_exportable"
                )
            if isinstance(event, Failed):
                raise EngineError(f"{checkpoint.path} was not merged: {event.message}")
            if isinstance(event, Merged):
                return event
    raise EngineError(f"{checkpoint.path} was not merged: the learner closed its output before it answered")
