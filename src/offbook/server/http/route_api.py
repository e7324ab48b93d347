"""What is known of the app whose calls pass through: numbers of calls, tokens, latency and price."""

from __future__ import annotations

from fastapi import APIRouter

from offbook.base.wire import RouteState

from ..services import ServicesDep

router = APIRouter(prefix="/api/routes")


@router.get("")
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
