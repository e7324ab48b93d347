"""Stored train requests and their outcomes."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from offbook.base.types import TrainResult
from offbook.base.wire import TrainRequest, TrainStatus

from ..errors import ApiError
from ..models.registry import ModelRegistry
from ..records.store import Store
from .jobs import JobFolders

logger = logging.getLogger(__name__)

_NEWEST = 1_000
"""Completed requests that are searched at start for lost checkpoints."""
INTERRUPTED = "The server ended before this request was applied; send it again with the same id"
"""Error of a request that a shutdown or a crash of the server interrupted."""


class TrainHistory:
    """The states of all train requests. A request is done if the database says so, or if a checkpoint has its id."""

    def __init__(self, store: Store, registry: ModelRegistry, jobs: JobFolders) -> None:
        self._store = store
        self._registry = registry
        self._jobs = jobs

    async def save(self, request: TrainRequest, status: TrainStatus) -> None:
        """Store a request and its state, replacing an earlier state. Raises StoreError."""
        await self._store.save_train(status, request.model_dump_json())

    async def status(self, request_id: str) -> TrainStatus:
        """The stored state of a request. Raises ApiError 404 for an unknown id."""
        status = await self._store.train(request_id)
        if status is None:
            raise ApiError(404, f"There is no train request {request_id!r}", "id", "unknown_request")
        return status

    async def result(self, request: TrainRequest) -> TrainResult | None:
        """The result of a request that was applied before; None if it was not.

        Raises ApiError 404 for an unknown model, and 409 if the same id was used with another body.
        """
        self._registry.model(request.model)
        stored = await self._store.train_request(request.id)
        if stored is not None:
            try:
                check_same(request, TrainRequest.model_validate_json(stored))
            except ValidationError:
                logger.warning("Train request %s was stored in an old format, so its body is not compared", request.id)
            status = await self._store.train(request.id)
            if status is not None and status.state == "done":
                return status.result
        return self.checkpointed(request.model, request.id)

    def checkpointed(self, model: str, request_id: str) -> TrainResult | None:
        """The result in the checkpoint that the request created, or None. Raises ApiError 404 for an unknown model."""
        checkpoint = self._registry.model(model).applied(request_id)
        return checkpoint.result() if checkpoint is not None else None

    async def settle(self) -> None:
        """Store an outcome for the requests that an earlier process left unfinished.

        A request with a checkpoint is done; any other is interrupted.
        """
        for status in await self._store.unfinished_trains():
            await self._settle(status)
        await self._report_lost_steps()

    async def _report_lost_steps(self) -> None:
        """Log the models whose newest trained step has no whole checkpoint on the disk."""
        trained: dict[str, int] = {}
        for status in await self._store.done_trains(_NEWEST):
            if status.result is not None and status.result.applied:
                trained[status.model] = max(trained.get(status.model, 0), status.result.step)
        for name, step in trained.items():
            model = self._registry.get(name)
            if model is not None and model.step < step:
                logger.error(
                    "Model %s was trained to step %d, but %s has no whole checkpoint of it: the model continues from step "
                    "%d. Restore the folder from a backup to continue from step %d",
                    *(name, step, model.checkpoint_folder, model.step, step),
                )

    async def _settle(self, status: TrainStatus) -> None:
        request = await self._store.train_request(status.id) or ""
        try:
            result = self.checkpointed(status.model, status.id)
        except ApiError:
            result = None  # its model is gone, or has another base
        if result is not None:
            settled = status.model_copy(update={"state": "done", "result": result, "error": None})
            self._jobs.remove(status.id)
            logger.info(
                "Train request %s of %s was applied before the last shutdown (step %d)",
                status.id,
                status.model,
                result.step,
            )
        else:
            settled = status.model_copy(update={"state": "interrupted", "error": INTERRUPTED})
            logger.warning("Train request %s of %s was interrupted and not applied", status.id, status.model)
        await self._store.save_train(settled, request)


def check_same(request: TrainRequest, known: TrainRequest) -> None:
    """Raise ApiError 409 if a request differs from the `known` one with the same id."""
    if request != known:
        raise ApiError(
            409,
            f"Train request {request.id!r} was sent before with another body; use a new id for a new request",
            "id",
            "id_reused",
        )
