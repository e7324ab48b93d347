"""The app whose calls pass through, in numbers; and feedback on what was recorded, of any app."""

from __future__ import annotations

from fastapi import APIRouter

from offbook.base import clock
from offbook.base.personal_data import mask_personal
from offbook.base.wire import FeedbackRequest, FeedbackResult, RouteState

from ..errors import ApiError
from ..records.feedback import Feedback, add_feedback
from ..services import ServicesDep
from ..upstream.threads import trajectory_id
from .json_body import JsonRoute

router = APIRouter(route_class=JsonRoute)


@router.post("/api/feedback")
async def feedback(request: FeedbackRequest, services: ServicesDep) -> FeedbackResult:
    """Store a score for a finished trajectory, found by its id, by one of its calls, or by the app's name of its thread."""
    name = request.trajectory_id
    if request.thread_id is not None:
        name = trajectory_id(request.route or services.options.route, request.thread_id)
    if request.comment is not None and not services.options.keep_personal:
        request = request.model_copy(update={"comment": mask_personal(request.comment)})
    first = None
    if services.upstream is not None:
        trajectory = name or str(request.call_id).rpartition(".")[0]
        first = await services.upstream.takeover.score(trajectory, request.name, request.score)
    try:
        return await services.store.write(add_feedback, Feedback(request, name, clock.now()))
    except ApiError as error:
        if first is None or error.status != 404 or name is None:
            raise
        return FeedbackResult(trajectory_id=name, reward=request.score, changed=first)  # not recorded, and compared


@router.get("/api/routes")
async def routes(services: ServicesDep) -> list[RouteState]:
    """The app behind --route with what was counted of it; none on a server without --upstream."""
    if services.upstream is None:
        return []
    traffic = services.upstream.traffic
    counts = traffic.counts
    fields = counts.model_dump(exclude={"seconds"})
    seconds = {"seconds_p50": counts.quantile(0.5), "seconds_p99": counts.quantile(0.99)}
    shares = {"name": traffic.name, "upstream": traffic.upstream.text, "record_share": traffic.policy.share}
    return [RouteState.model_validate(shares | seconds | fields)]
