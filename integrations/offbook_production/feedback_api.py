"""The app whose calls pass through, in numbers; and feedback on what was recorded, of any app."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter

from offbook.base import clock
from offbook.base.redaction import mask_personal
from offbook.server.errors import ApiError
from offbook.server.http.json_body import JsonRoute

from .feedback import FeedbackRequest, FeedbackResult, RouteState
from .gateway.threads import trajectory_id
from .production import Production, ProductionDep
from .records.feedback import Feedback, add_feedback

router = APIRouter(route_class=JsonRoute)
SETTLE_SECONDS = 5.0
"""How long feedback on an unknown call waits for the calls that are still to be recorded."""


@router.post("/api/feedback")
async def feedback(request: FeedbackRequest, production: ProductionDep) -> FeedbackResult:
    """Store a score for a finished trajectory, found by its id, by one of its calls, or by the app's name of its thread."""
    name = request.trajectory_id
    if request.thread_id is not None:
        name = trajectory_id(request.route or production.options.route, request.thread_id)
    if request.comment is not None and not production.options.keep_personal:
        request = request.model_copy(update={"comment": mask_personal(request.comment)})
    try:
        result = await _stored(Feedback(request, name, clock.now()), production)
    except ApiError as error:
        if error.status != 404 or name is None:
            raise
        first = await _scored(request, name, production)  # a takeover's thread need not be recorded
        if first is None:
            raise
        return FeedbackResult(trajectory_id=name, reward=request.score, changed=first)
    with suppress(ApiError):  # a score beyond the rule's is feedback all the same
        await _scored(request, result.trajectory_id, production)
    return result


async def _stored(feedback: Feedback, production: Production) -> FeedbackResult:
    try:
        return await production.server.store.write(add_feedback, feedback)
    except ApiError as error:
        if error.status != 404:
            raise
        await _read_what_waits(production)  # its call may have been answered just now
        return await production.server.store.write(add_feedback, feedback)


async def _scored(request: FeedbackRequest, trajectory: str, production: Production) -> bool | None:
    """Take a score in as evidence of the takeover that has its thread, after the records have taken it: what they refuse is no
    evidence. Returns whether it is the thread's first; None: no evidence. Raises ApiError 400 for one beyond the rule's."""
    answered_by = None
    if request.call_id is not None:
        record = (await production.server.store.finished([trajectory])).get(trajectory)
        calls = () if record is None else record.outside_calls
        answered_by = next((call.model for call in calls if call.id == request.call_id), None)
    for takeover in production.takeovers:
        first = await takeover.score(trajectory, request.name, request.score, answered_by)
        if first is not None:
            return first
    return None


async def _read_what_waits(production: ProductionDep) -> None:
    if production.gateway is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(production.gateway.traffic.settled(), SETTLE_SECONDS)


@router.get("/api/routes")
async def routes(production: ProductionDep) -> list[RouteState]:
    """The app behind --route, with what was counted of it; nothing without --upstream."""
    if production.gateway is None:
        return []
    traffic = production.gateway.traffic
    counts = traffic.counts
    fields = counts.model_dump(exclude={"seconds"})
    seconds = {"seconds_p50": counts.quantile(0.5), "seconds_p99": counts.quantile(0.99)}
    shares = {"name": traffic.name, "upstream": traffic.upstream.text, "record_share": traffic.policy.share}
    return [RouteState.model_validate(shares | seconds | fields)]
