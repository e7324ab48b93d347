"""Routes of trajectories, of models and checkpoints with their exports, and of training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import ValidationError

from offbook.base import clock, server_sent_events
from offbook.base.config import Name
from offbook.base.errors import EngineError
from offbook.base.redaction import Redaction, redacted_record
from offbook.base.types import new_id
from offbook.base.wire import (
    AdoptRequest,
    ArchiveRequest,
    ArchiveState,
    CheckpointState,
    ExportFormat,
    ExportRequest,
    ExportResult,
    FinishRequest,
    FinishResult,
    ForkRequest,
    LogRequest,
    ModelState,
    RegisterRequest,
    RunEnd,
    TracePage,
    TrainEvent,
    TrainRequest,
    TrainStatus,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryWithCalls,
    UserState,
    name_at,
)

from ...engine.checkpoint_files import Checkpoint
from ...engine.protocol import Failed, MergeCommand, Merged
from ..errors import ApiError, bad_request
from ..models.checkpoints import state_of, write_text
from ..models.registration import ALL_LINEAR, check_target_modules
from ..models.registry import ServedModel
from ..records.notes import end_note, save_notes
from ..services import Services, ServicesDep
from ..training.archives import archive_id, new_folder, write_export
from ..training.learner_client import LearnerClient
from ..training.runner import TrainFeed
from ..wing import tell_of_new_step
from .json_body import JsonRoute

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""After this time without an event a comment line is sent, so that proxies and clients keep the stream open."""

router = APIRouter(prefix="/api", route_class=JsonRoute)


class TarResponse(FileResponse):
    """A tar archive, or the requested range of it."""

    media_type = "application/x-tar"


class TrainEvents(StreamingResponse):
    """A stream of server-sent events; every event is a TrainEvent."""

    media_type = server_sent_events.EVENT_STREAM


@router.post("/trajectories", response_model_exclude_defaults=True)
async def finish_trajectories(request: Request, services: ServicesDep) -> FinishResult:
    """Finish trajectories and claim their calls, atomically. Keys in their texts are redacted, whatever the client is."""
    try:
        body = FinishRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise bad_request(error, "body") from error
    calls = await services.store.finish([redacted_record(record) for record in body.trajectories])
    expired = await services.store.expired([record.id for record in body.trajectories if record.calls is None])
    return FinishResult(calls=calls, expired=expired)


@router.get("/trajectories", responses={200: {"model": TrajectoryPage}})
async def list_trajectories(query: Annotated[TrajectoryQuery, Query()], services: ServicesDep) -> Response:
    """A page of the finished trajectories that match every filter."""
    page = await services.store.trajectories(query)
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/traces", responses={200: {"model": TracePage}})
async def list_traces(query: Annotated[TrajectoryQuery, Query()], services: ServicesDep) -> Response:
    """A page of the finished trajectories that match every filter, with their calls but without token arrays."""
    page = await services.store.traces(query)
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/trajectories/{trajectory_id:path}", responses={200: {"model": TrajectoryWithCalls}})
async def get_trajectory(trajectory_id: str, services: ServicesDep) -> Response:
    """A trajectory with its calls, finished or not."""
    trajectory = await services.store.trajectory(trajectory_id)
    if trajectory is None:
        message = f"no trajectory {trajectory_id!r}: nothing was recorded or finished under that id"
        raise ApiError(404, message, "id", "unknown_trajectory")
    return Response(trajectory.model_dump_json(), media_type="application/json")


@router.get("/models")
async def list_models(services: ServicesDep) -> list[ModelState]:
    """All registered models."""
    return [_state(services, model) for model in services.models.registry.models()]


@router.post("/models")
async def register_model(services: ServicesDep, body: RegisterRequest) -> ModelState:
    """Register a trainable model, or return the existing one of the same name, base and LoRA shape. `target_modules` that
    name layers are compared with the base's, so the answer waits until the learner has loaded it."""
    if services.learner is not None and body.lora is not None and body.lora.target_modules != ALL_LINEAR:
        await services.sampler.ready()  # the learner starts after it
        check_target_modules(body.lora.target_modules, await services.learner.linear_layers())
    return services.models.registration.register(body, in_training=services.training.concerns(body.name))


@router.get("/models/{name}")
async def get_model(services: ServicesDep, name: str) -> ModelState:
    """One registered model with its newest step."""
    training = services.training.concerns(name)  # before the step is read: an update that ends meanwhile is in it
    return _state(services, services.models.registry.model(name)).model_copy(update={"training": training})


@router.post("/models/{name}/fork")
async def fork_model(services: ServicesDep, name: str, body: ForkRequest) -> ModelState:
    """Create a model that starts from a step of this one."""
    return await services.models.registration.fork(name, body)


@router.post("/models/{name}/adopt")
async def adopt_step(services: ServicesDep, name: str, body: AdoptRequest) -> ModelState:
    """Make a step of another model, such as a fork that was trained and compared, the newest step of this one."""
    if services.training.concerns(name):
        raise ApiError(409, f"Model {name!r} is in training: adopt a step when it has ended", "name", "in_training")
    state = await services.models.swaps.adopt(name, body)
    tell_of_new_step(services.wings)
    return state


@router.post("/models/{name}/log")
async def add_log(services: ServicesDep, name: Name, body: LogRequest) -> dict[str, str]:
    """Store metrics under a model name, also of a model that was never registered. Keys in their names are redacted."""
    await services.store.add_log(name, body.model_copy(update={"metrics": Redaction().value(body.metrics)}))
    return {}


@router.get("/models/{name}/log")
async def list_logs(services: ServicesDep, name: Name) -> list[LogRequest]:
    """All metrics stored under a model name, oldest first."""
    return await services.store.logs(name)


@router.post("/runs/ended")
async def end_run(services: ServicesDep, body: RunEnd) -> dict[str, str]:
    """Note that a run is over, which `offbook runs` shows."""
    await services.store.write(save_notes, (end_note(body.run), repr(clock.now())))
    return {}


@router.get("/models/{name}/state", responses={200: {"model": UserState}})
async def get_state(services: ServicesDep, name: str) -> Response:
    """The user's JSON object stored with the model. Returned as stored, since FastAPI would take seconds to re-serialise it."""
    path = _state_file(services, name)
    text = await asyncio.to_thread(path.read_text, "utf-8") if path.exists() else UserState().model_dump_json()
    return Response(text, media_type="application/json")


@router.put("/models/{name}/state", responses={200: {"model": UserState}})
async def put_state(services: ServicesDep, name: str, body: UserState) -> Response:
    """Replace the user's JSON object stored with the model."""
    text = body.model_dump_json()
    await asyncio.to_thread(write_text, _state_file(services, name), text)
    return Response(text, media_type="application/json")


def _state(services: Services, model: ServedModel) -> ModelState:
    held = max((wing.steps_held(model) for wing in services.wings.values()), default=0)
    return model.state().model_copy(update={"steps_held": held})


def _state_file(services: Services, name: str) -> Path:
    return services.models.registry.model(name).folder / "state.json"


@router.get("/models/{name}/checkpoints")
async def list_checkpoints(services: ServicesDep, name: str) -> list[CheckpointState]:
    """The model's checkpoints by step."""
    checkpoints = services.models.registry.model(name).checkpoints
    return [state_of(checkpoints[step]) for step in sorted(checkpoints)]


@router.delete("/models/{name}/checkpoints/{step}")
async def delete_checkpoint(services: ServicesDep, name: str, step: int) -> dict[str, str]:
    """Delete a checkpoint. The newest cannot be deleted."""
    await services.models.swaps.delete(name, step)
    return {}


@router.post("/models/{name}/checkpoints/{step}/export")
async def export_checkpoint(services: ServicesDep, name: str, step: int, body: ExportRequest) -> ExportResult:
    """Export a checkpoint to a new folder on the server's machine."""
    return await _export(services, name, step, body)


@router.post("/models/{name}/checkpoints/{step}/archive")
async def archive_checkpoint(services: ServicesDep, name: str, step: int, body: ArchiveRequest) -> ArchiveState:
    """Create a downloadable archive of an export. The same request returns the same archive, or one with equal bytes."""
    return await _archive(services, name, step, body)


@router.get("/exports/{archive_id}", response_class=TarResponse)
async def download(services: ServicesDep, archive_id: str) -> TarResponse:
    """Download an archive; supports ranges. The ETag is its SHA-256."""
    path, state = services.archives.get(archive_id)
    return TarResponse(path, headers={"etag": f'"{state.sha256}"'})


@router.delete("/exports/{archive_id}")
async def delete_archive(services: ServicesDep, archive_id: str) -> dict[str, str]:
    """Delete an archive."""
    services.archives.remove(archive_id)
    return {}


@router.post("/train", response_class=TrainEvents)
async def train(services: ServicesDep, body: TrainRequest) -> TrainEvents:
    """Apply a train request and stream its events. A request with a known id is not applied again. Keys in the texts of
    groups are redacted, whatever the client is."""
    body = body.model_copy(update={"groups": tuple(redacted_record(group) for group in body.groups)})
    feed = await services.training.submit(body)
    return TrainEvents(_server_sent(feed), headers={"cache-control": "no-cache"})


@router.get("/train/{request_id:path}")
async def train_status(services: ServicesDep, request_id: str) -> TrainStatus:
    """The state of a train request."""
    return await services.train_history.status(request_id)


async def _server_sent(feed: TrainFeed) -> AsyncIterator[bytes]:
    """The feed as server-sent events. The train request continues when the listener disconnects."""
    events = feed.listen()
    waiting: asyncio.Task[TrainEvent] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({waiting}, timeout=HEARTBEAT_SECONDS)
            if not done:
                yield b": still running\n\n"
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield server_sent_events.event(event.model_dump_json().encode())
    finally:
        if waiting is not None:
            waiting.cancel()


async def _export(services: Services, name: str, step: int, request: ExportRequest) -> ExportResult:
    """Export a step of the model `name` to the folder `request.output`. Raises ApiError, EngineError, OSError."""
    output = new_folder(request.output)
    _check_step(step)
    async with services.models.leases.lease(name_at(name, step)) as route:
        checkpoint = services.models.registry.model(route.model).checkpoints[step]
        return await _write(services, checkpoint, request.format, output)


async def _archive(services: Services, name: str, step: int, request: ArchiveRequest) -> ArchiveState:
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
