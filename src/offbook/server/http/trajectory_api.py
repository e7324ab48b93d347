"""Routes of trajectories: finish, list and read them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from offbook.base.redaction import redacted_record
from offbook.base.wire import (
    FinishRequest,
    FinishResult,
    TracePage,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryWithCalls,
)

from ..errors import ApiError, bad_request
from ..services import ServicesDep
from .json_body import check_size

router = APIRouter(prefix="/api/trajectories")
traces = APIRouter(prefix="/api/traces")


@router.post("", response_model_exclude_defaults=True)
async def finish(request: Request, services: ServicesDep) -> FinishResult:
    """Finish trajectories and claim their calls, atomically. Keys in their texts are redacted, whatever the client is."""
    raw = await request.body()
    check_size("/api/trajectories", raw)
    try:
        body = FinishRequest.model_validate_json(raw)
    except ValidationError as error:
        raise bad_request(error, "body") from error
    calls = await services.store.finish([redacted_record(record) for record in body.trajectories])
    expired = await services.store.expired([record.id for record in body.trajectories if record.calls is None])
    return FinishResult(calls=calls, expired=expired)


@router.get("", responses={200: {"model": TrajectoryPage}})
async def listed(query: Annotated[TrajectoryQuery, Query()], services: ServicesDep) -> Response:
    """A page of the finished trajectories that match every filter."""
    page = await services.store.trajectories(query)
    return Response(page.model_dump_json(), media_type="application/json")


@traces.get("", responses={200: {"model": TracePage}})
async def listed_traces(query: Annotated[TrajectoryQuery, Query()], services: ServicesDep) -> Response:
    """A page of the finished trajectories that match every filter, with their calls but without token arrays."""
    page = await services.store.traces(query)
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{trajectory_id:path}", responses={200: {"model": TrajectoryWithCalls}})
async def one(trajectory_id: str, services: ServicesDep) -> Response:
    """A trajectory with its calls, finished or not."""
    trajectory = await services.store.trajectory(trajectory_id)
    if trajectory is None:
        message = f"no trajectory {trajectory_id!r}: nothing was recorded or finished under that id"
        raise ApiError(404, message, "id", "unknown_trajectory")
    return Response(trajectory.model_dump_json(), media_type="application/json")
