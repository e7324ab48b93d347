"""The requests of this wing's routes."""

from __future__ import annotations

from typing import Literal
from urllib.parse import quote

from offbook.client.connection.http import Api

from .audits import AuditRequest, Removal, StepAudit, TrajectoryAudit
from .feedback import FeedbackRequest, FeedbackResult
from .wire import TakeoverRule, TakeoverState


async def send_feedback(api: Api, request: FeedbackRequest) -> FeedbackResult:
    """Store a score for a finished trajectory, one of its calls, or a thread."""
    return await api.ask(FeedbackResult, "POST", "/api/feedback", request)


async def audit_step(api: Api, name: str, step: int) -> StepAudit:
    """What trained a step of a model."""
    return await api.ask(StepAudit, "GET", f"/api/audit/{quote(name, safe='')}/{step}")


async def audit_trajectories(api: Api, request: AuditRequest) -> list[TrajectoryAudit]:
    """The steps that each of these trajectories trained."""
    return await api.ask(list[TrajectoryAudit], "POST", "/api/audit", request)


async def remove_trajectories(api: Api, request: AuditRequest) -> Removal:
    """Delete these trajectories, and those made from them; may take up to an hour with large records."""
    return await api.ask(Removal, "POST", "/api/audit/removal", request, timeout=3600)


async def takeover_state(api: Api, route: str | None = None) -> TakeoverState:
    """The takeover of a route, with every decision. None: that of the server's --route."""
    return await api.ask(TakeoverState, "GET", f"/api/takeover{_of_route(route)}")


async def change_takeover(
    api: Api, action: Literal["start", "stop"], rule: TakeoverRule | None = None, route: str | None = None
) -> TakeoverState:
    """Start or stop a takeover. `route` as in `takeover_state`."""
    path = f"/api/takeover/{action}{_of_route(route)}"
    return await api.ask(TakeoverState, "POST", path, rule, repeat=False)


def _of_route(route: str | None) -> str:
    return "" if route is None else f"?route={quote(route, safe='')}"
