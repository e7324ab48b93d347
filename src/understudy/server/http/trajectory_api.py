"""Trajectories over HTTP: finish them, list them, look at one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from ...wire import FinishRequest, FinishResult, TrajectoryQuery
from ..errors import ApiError, bad_request
from ..services import Given

router = APIRouter(prefix="/api/trajectories")


@router.post("")
async def finish(request: Request, given: Given) -> FinishResult:
    """Seal trajectories and claim their calls, all or none."""
    try:
        asked = FinishRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise bad_request(error, "body") from error
    return FinishResult(calls=await given.store.finish(asked.trajectories))


@router.get("")
async def listed(query: Annotated[TrajectoryQuery, Query()], given: Given) -> Response:
    """A page of the finished trajectories that fit every filter."""
    page = await given.store.trajectories(query)
    return Response(page.model_dump_json(), media_type="application/json")


@router.get("/{trajectory_id:path}")
async def one(trajectory_id: str, given: Given) -> Response:
    """A trajectory with its calls, finished or not."""
    found = await given.store.trajectory(trajectory_id)
    if found is None:
        message = f"no trajectory {trajectory_id!r}: nothing was recorded or finished under that id"
        raise ApiError(404, message, "id", "unknown_trajectory")
    return Response(found.model_dump_json(), media_type="application/json")
