"""Trajectories over HTTP: finish them, list them, look at one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from ...wire import FinishRequest, FinishResult, TrajectoryQuery
from ..errors import ApiError, bad_request
from ..services import ServicesDep

router = APIRouter(prefix="/api/trajectories")
traces = APIRouter(prefix="/api/traces")


@router.post("")
async def finish(request: Request, services: ServicesDep) -> FinishResult:
    """Seal trajectories and claim their calls, all or none."""
    try:
        body = FinishRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise bad_request(error, "body") from error
    return FinishResult(calls=await services.store.finish(body.trajectories))


@router.get("")
async def listed(query: Annotated[TrajectoryQuery, Query()], services: ServicesDep) -> Response:
    """A page of the finished trajectories that fit every filter."""
    page = await services.store.trajectories(query)
    return Response(page.model_dump_json(), media_type="application/json")


@traces.get("")
async def listed_traces(query: Annotated[TrajectoryQuery, Query()], services: ServicesDep) -> Response:
    """A page of the finished trajectories that fit every filter, with their calls but without token arrays."""
    page = await services.store.traces(query)
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{trajectory_id:path}")
async def one(trajectory_id: str, services: ServicesDep) -> Response:
    """A trajectory with its calls, finished or not."""
    trajectory = await services.store.trajectory(trajectory_id)
    if trajectory is None:
        message = f"no trajectory {trajectory_id!r}: nothing was recorded or finished under that id"
        raise ApiError(404, message, "id", "unknown_trajectory")
    return Response(trajectory.model_dump_json(), media_type="application/json")
