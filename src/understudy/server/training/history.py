"""Train requests of before: their stored outcomes, and the checkpoints that tell of them."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from ...types import TrainResult
from ...wire import TrainRequest, TrainStatus
from ..errors import ApiError
from ..models.registry import ModelRegistry
from ..records.store import Store
from .job_folders import JobFolders

log = logging.getLogger(__name__)

_LOOKED_AT = 1_000
"""Requests that are looked at for steps that were lost."""
INTERRUPTED = "The server ended before this request was applied; send it again with the same id"


class TrainHistory:
    """A request is done when the store says so, or when a checkpoint names it."""

    def __init__(self, store: Store, registry: ModelRegistry, jobs: JobFolders) -> None:
        self._store = store
        self._registry = registry
        self._jobs = jobs

    async def save(self, request: TrainRequest, status: TrainStatus) -> None:
        """Write a request's state over what was known of it. Raises StoreError."""
        await self._store.save_train(status, request.model_dump_json())

    async def status(self, request_id: str) -> TrainStatus:
        """Raises ApiError 404."""
        status = await self._store.train(request_id)
        if status is None:
            raise ApiError(404, f"There is no train request {request_id!r}", "id", "unknown_request")
        return status

    async def result(self, request: TrainRequest) -> TrainResult | None:
        """The result of a request that was applied before. Raises ApiError: 404 unknown model, 409 another body."""
        self._registry.model(request.model)
        stored = await self._store.train_request(request.id)
        if stored is not None:
            try:
                check_same(request, TrainRequest.model_validate_json(stored))
            except ValidationError:
                log.warning("Train request %s was stored in a shape that is no longer read", request.id)
            status = await self._store.train(request.id)
            if status is not None and status.state == "done":
                return status.result
        return self.checkpointed(request.model, request.id)

    def checkpointed(self, model: str, request_id: str) -> TrainResult | None:
        """The result that the request's checkpoint tells. Raises ApiError 404 for an unknown model."""
        checkpoint = self._registry.model(model).applied(request_id)
        return checkpoint.result() if checkpoint is not None else None

    async def settle(self) -> None:
        """Close the requests that an earlier run did not finish: done where a checkpoint is there, else interrupted."""
        for status in await self._store.unfinished_trains():
            await self._settle(status)
        await self._tell_lost_steps()

    async def _tell_lost_steps(self) -> None:
        """Name the models whose newest step was recorded and is not on the disk: deleted, or lost with the disk."""
        trained: dict[str, int] = {}
        for status in await self._store.done_trains(_LOOKED_AT):
            if status.result is not None and status.result.applied:
                trained[status.model] = max(trained.get(status.model, 0), status.result.step)
        for name, step in trained.items():
            model = self._registry.get(name)
            if model is not None and model.step < step:
                log.error(
                    "Model %s was trained to step %d, and %s holds no whole checkpoint of it: the model goes on from step "
                    "%d. Restore the folder from a backup to go on from step %d",
                    *(name, step, model.checkpoint_folder, model.step, step),
                )

    async def _settle(self, status: TrainStatus) -> None:
        request = await self._store.train_request(status.id) or ""
        try:
            result = self.checkpointed(status.model, status.id)
        except ApiError:
            result = None  # its model is gone, or is served on another base
        if result is not None:
            settled = status.model_copy(update={"state": "done", "result": result, "error": None})
            self._jobs.remove(status.id)
            log.info("Train request %s of %s had been applied (step %d)", status.id, status.model, result.step)
        else:
            settled = status.model_copy(update={"state": "interrupted", "error": INTERRUPTED})
            log.warning("Train request %s of %s was interrupted and not applied", status.id, status.model)
        await self._store.save_train(settled, request)


def check_same(request: TrainRequest, known: TrainRequest) -> None:
    """Raises ApiError 409 when two requests with one id differ."""
    if request != known:
        raise ApiError(
            409,
            f"Train request {request.id!r} was sent before with another body; give a new request a new id",
            "id",
            "id_reused",
        )
