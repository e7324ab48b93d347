"""Routes of models, checkpoints and training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from ...config import Name
from ...types import Json
from ...wire import (
    CheckpointState,
    ExportRequest,
    ExportResult,
    ForkRequest,
    LogRequest,
    ModelState,
    RegisterRequest,
    TrainRequest,
    TrainStatus,
    UserState,
)
from ..models.checkpoints import write_text
from ..services import Given
from ..training import exports
from ..training.feed import TrainFeed

HEARTBEAT_SECONDS = 10.0
"""A comment line is sent after so much silence, so that proxies and clients see that the stream lives."""

router = APIRouter(prefix="/api")


@router.get("/models")
async def list_models(given: Given) -> list[ModelState]:
    return [model.state() for model in given.models.registry.models()]


@router.post("/models")
async def register_model(given: Given, body: RegisterRequest) -> ModelState:
    return given.models.registration.register(body, in_training=given.training.concerns(body.name))


@router.get("/models/{name}")
async def get_model(given: Given, name: str) -> ModelState:
    return given.models.registry.model(name).state()


@router.post("/models/{name}/fork")
async def fork_model(given: Given, name: str, body: ForkRequest) -> ModelState:
    return await given.models.registration.fork(name, body)


@router.post("/models/{name}/log")
async def add_log(given: Given, name: Name, body: LogRequest) -> dict[str, Json]:
    """Of any model, also one that is only compared with and was never registered."""
    await given.store.add_log(name, body)
    return {}


@router.get("/models/{name}/log")
async def list_logs(given: Given, name: Name) -> list[LogRequest]:
    return await given.store.logs(name)


@router.get("/models/{name}/state")
async def get_state(given: Given, name: str) -> UserState:
    path = _state_file(given, name)
    if not path.exists():
        return UserState()
    return UserState.model_validate_json(await asyncio.to_thread(path.read_text, "utf-8"))


@router.put("/models/{name}/state")
async def put_state(given: Given, name: str, body: UserState) -> UserState:
    await asyncio.to_thread(write_text, _state_file(given, name), body.model_dump_json())
    return body


def _state_file(given: Given, name: str) -> Path:
    return given.models.registry.model(name).folder / "state.json"


@router.get("/models/{name}/checkpoints")
async def list_checkpoints(given: Given, name: str) -> list[CheckpointState]:
    found = given.models.registry.model(name).checkpoints
    return [found[step].state() for step in sorted(found)]


@router.delete("/models/{name}/checkpoints/{step}")
async def delete_checkpoint(given: Given, name: str, step: int) -> dict[str, Json]:
    await given.models.swaps.delete(name, step)
    return {}


@router.post("/models/{name}/checkpoints/{step}/export")
async def export_checkpoint(given: Given, name: str, step: int, body: ExportRequest) -> ExportResult:
    return await exports.export(given, name, step, body)


@router.post("/train")
async def train(given: Given, body: TrainRequest) -> StreamingResponse:
    feed = await given.training.submit(body)
    return StreamingResponse(_server_sent(feed), media_type="text/event-stream", headers={"cache-control": "no-cache"})


@router.get("/train/{request_id:path}")
async def train_status(given: Given, request_id: str) -> TrainStatus:
    return await given.train_history.status(request_id)


async def _server_sent(feed: TrainFeed) -> AsyncIterator[bytes]:
    """The feed as server-sent events. A listener that goes away leaves the request running."""
    events = feed.listen()
    waiting: asyncio.Task[Json] | None = None
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
