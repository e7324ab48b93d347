"""A takeover over HTTP: its plan, its start, its state, a person's approval, and its end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from offbook.base.server_options import RouteName
from offbook.base.takeovers import TakeoverPlan, TakeoverState

from ..services import Services, ServicesDep
from ..takeover.stage import needs_of
from ..takeover.takeover import Takeover
from ..upstream.served_routes import is_gateways, takeover_of
from .json_body import JsonRoute

router = APIRouter(route_class=JsonRoute)
Route = Annotated[RouteName | None, Query()]
"""The route's name; None: the gateway's, else the only one."""


@router.get("/api/takeover")
async def state(services: ServicesDep, route: Route = None) -> TakeoverState:
    """The state of a route's takeover, with its numbers and every decision. 404 for a route that is not there."""
    return takeover_of(services, route).current()


@router.post("/api/takeover/plan")
async def plan(plan: TakeoverPlan, services: ServicesDep, route: Route = None) -> TakeoverState:
    """What a takeover with this plan would be: its model and the threads that each stage needs. Changes nothing."""
    name = route or takeover_of(services, None).state.route
    return TakeoverState(route=name, model=small_model(services, plan, name), plan=plan, needs=needs_of(plan))


@router.post("/api/takeover/start")
async def start(plan: TakeoverPlan, services: ServicesDep, route: Route = None) -> TakeoverState:
    """Begin a takeover. 409 while one is under way, 404 for an unknown model."""
    name = route or takeover_of(services, None).state.route
    model = small_model(services, plan, name)
    return await (await _opened(services, name)).start(plan, model)


@router.post("/api/takeover/approve")
async def approve(services: ServicesDep, route: Route = None) -> TakeoverState:
    """Begin the stage that waits for a person. 409 if none does."""
    return await takeover_of(services, route).approve()


@router.post("/api/takeover/stop")
async def stop(services: ServicesDep, route: Route = None) -> TakeoverState:
    """Give all calls to the paid model again. 409 if they are there."""
    return await takeover_of(services, route).stop()


async def _opened(services: Services, route: str) -> Takeover:
    """The takeover of a route, which may be begun before its app makes a call."""
    if is_gateways(services, route):
        return takeover_of(services, route)
    return (await services.app_routes.opened(route)).takeover


def small_model(services: Services, plan: TakeoverPlan, route: str) -> str:
    """The small model's name with its step, so that training goes on without changing what is compared. Without one in the plan,
    it is the server's own on the gateway's route, else the model that is named as the route."""
    name = plan.model or (services.options.name if is_gateways(services, route) else route)
    chosen = services.models.registry.resolve(name)
    return f"{chosen.model}@{chosen.step}" if chosen.model != services.base.name else chosen.model
