"""Routes of models, checkpoints and training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, StreamingResponse

from ...config import Name
from ...wire import (
    ArchiveRequest,
    ArchiveState,
    CheckpointState,
    ExportRequest,
    ExportResult,
    ForkRequest,
    LogRequest,
    ModelState,
    RegisterRequest,
    TrainEvent,
    TrainRequest,
    TrainStatus,
    UserState,
)
from ..models.checkpoints import state_of, write_text
from ..services import Services, ServicesDep
from ..training import exports
from ..training.feed import TrainFeed

HEARTBEAT_SECONDS = 10.0
"""A comment line is sent after so much silence, so that proxies and clients see that the stream lives."""

router = APIRouter(prefix="/api")


@router.get("/models")
async def list_models(services: ServicesDep) -> list[ModelState]:
    return [model.state() for model in services.models.registry.models()]


@router.post("/models")
async def register_model(services: ServicesDep, body: RegisterRequest) -> ModelState:
    return services.models.registration.register(body, in_training=services.training.concerns(body.name))


@router.get("/models/{name}")
async def get_model(services: ServicesDep, name: str) -> ModelState:
    return services.models.registry.model(name).state()


@router.post("/models/{name}/fork")
async def fork_model(services: ServicesDep, name: str, body: ForkRequest) -> ModelState:
    return await services.models.registration.fork(name, body)


@router.post("/models/{name}/log")
async def add_log(services: ServicesDep, name: Name, body: LogRequest) -> dict[str, str]:
    """Of any model, also one that is only compared with and was never registered."""
    await services.store.add_log(name, body)
    return {}


@router.get("/models/{name}/log")
async def list_logs(services: ServicesDep, name: Name) -> list[LogRequest]:
    return await services.store.logs(name)


@router.get("/models/{name}/state")
async def get_state(services: ServicesDep, name: str) -> UserState:
    path = _state_file(services, name)
    if not path.exists():
        return UserState()
    return UserState.model_validate_json(await asyncio.to_thread(path.read_text, "utf-8"))


@router.put("/models/{name}/state")
async def put_state(services: ServicesDep, name: str, body: UserState) -> UserState:
    await asyncio.to_thread(write_text, _state_file(services, name), body.model_dump_json())
    return body


def _state_file(services: Services, name: str) -> Path:
    return services.models.registry.model(name).folder / "state.json"


@router.get("/models/{name}/checkpoints")
async def list_checkpoints(services: ServicesDep, name: str) -> list[CheckpointState]:
    checkpoints = services.models.registry.model(name).checkpoints
    return [state_of(checkpoints[step]) for step in sorted(checkpoints)]


@router.delete("/models/{name}/checkpoints/{step}")
async def delete_checkpoint(services: ServicesDep, name: str, step: int) -> dict[str, str]:
    await services.models.swaps.delete(name, step)
    return {}


@router.post("/models/{name}/checkpoints/{step}/export")
async def export_checkpoint(services: ServicesDep, name: str, step: int, body: ExportRequest) -> ExportResult:
    return await exports.export(services, name, step, body)


@router.post("/models/{name}/checkpoints/{step}/archive")
async def archive_checkpoint(services: ServicesDep, name: str, step: int, body: ArchiveRequest) -> ArchiveState:
    """Make an export for clients elsewhere; the same request again finds it, or makes the same bytes."""
    return await exports.archive(services, name, step, body)


@router.get("/exports/{archive_id}")
async def download(services: ServicesDep, archive_id: str) -> FileResponse:
    path, state = services.archives.get(archive_id)
    return FileResponse(path, media_type="application/x-tar", headers={"etag": f'"{state.sha256}"'})


@router.delete("/exports/{archive_id}")
async def delete_archive(services: ServicesDep, archive_id: str) -> dict[str, str]:
    services.archives.remove(archive_id)
    return {}


@router.post("/train")
async def train(services: ServicesDep, body: TrainRequest) -> StreamingResponse:
    feed = await services.training.submit(body)
    return StreamingResponse(_server_sent(feed), media_type="text/event-stream", headers={"cache-control": "no-cache"})


@router.get("/train/{request_id:path}")
async def train_status(services: ServicesDep, request_id: str) -> TrainStatus:
    return await services.train_history.status(request_id)


async def _server_sent(feed: TrainFeed) -> AsyncIterator[bytes]:
    """The feed as server-sent events. A listener that goes away leaves the request running."""
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
            yield f"data: {event.model_dump_json()}\n\n".encode()
    finally:
        if waiting is not None:
            waiting.cancel()
