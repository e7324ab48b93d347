"""A takeover over HTTP: its plan, its start, its state, a person's approval, and its end."""

from __future__ import annotations

from fastapi import APIRouter

from offbook.base.takeovers import TakeoverPlan, TakeoverState

from ..errors import ApiError
from ..services import Services, ServicesDep
from ..takeover.stage import needs_of
from ..takeover.takeover import Takeover
from .json_body import JsonRoute

router = APIRouter(route_class=JsonRoute)


@router.get("/api/takeover")
async def state(services: ServicesDep) -> TakeoverState:
    """The state of the route's takeover, with its numbers and every decision. 404 on a server without --upstream."""
    return _takeover(services).current()


@router.post("/api/takeover/plan")
async def plan(plan: TakeoverPlan, services: ServicesDep) -> TakeoverState:
    """What a takeover with this plan would be: its model and the threads that each stage needs. Changes nothing."""
    route = _takeover(services).state.route
    return TakeoverState(route=route, model=_model(services, plan), plan=plan, needs=needs_of(plan))


@router.post("/api/takeover/start")
async def start(plan: TakeoverPlan, services: ServicesDep) -> TakeoverState:
    """Begin a takeover. 409 while one is under way, 404 for an unknown model."""
    return await _takeover(services).start(plan, _model(services, plan))


@router.post("/api/takeover/approve")
async def approve(services: ServicesDep) -> TakeoverState:
    """Begin the stage that waits for a person. 409 if none does."""
    return await _takeover(services).approve()


@router.post("/api/takeover/stop")
async def stop(services: ServicesDep) -> TakeoverState:
    """Give all calls to the paid model again. 409 if they are there."""
    return await _takeover(services).stop()


def _takeover(services: Services) -> Takeover:
    if services.upstream is None:
        raise ApiError(404, "this server stands before no paid model: start it with --upstream", code="no_upstream")
    return services.upstream.takeover


def _model(services: Services, plan: TakeoverPlan) -> str:
    """The small model's name with its step, so that training goes on without changing what is compared."""
    name = plan.model or services.options.name
    route = services.models.registry.resolve(name)
    return f"{route.model}@{route.step}" if route.model != services.base.name else route.model
