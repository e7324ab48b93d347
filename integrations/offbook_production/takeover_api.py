"""A takeover over HTTP: its start, its state, its end, and the side of a thread for an app that asks its paid model itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from offbook.server.http.json_body import JsonRoute

from .options import RouteName
from .production import Production, ProductionDep
from .takeover.takeover import Takeover
from .wire import TakeoverRule, TakeoverState, ThreadSide

router = APIRouter(route_class=JsonRoute)
Route = Annotated[RouteName | None, Query()]
"""The route's name; None: that of --route."""


@router.get("/api/takeover")
async def state(production: ProductionDep, route: Route = None) -> TakeoverState:
    """The state of a route's takeover, with its numbers and every decision. 404 for a route that is not there."""
    return _takeover(production, route).current()


@router.post("/api/takeover/start")
async def start(rule: TakeoverRule, production: ProductionDep, route: Route = None) -> TakeoverState:
    """Begin a takeover, of an app that asks its paid model itself if the route is not the gateway's. 409 while one is under way,
    404 for an unknown model."""
    name = route or production.options.route
    model = _small_model(production, rule, name)
    return await (await production.takeovers.opened(name)).start(rule, model)


@router.post("/api/takeover/stop")
async def stop(production: ProductionDep, route: Route = None) -> TakeoverState:
    """Give all calls to the paid model again. 409 if they are there."""
    return await _takeover(production, route).stop()


@router.get("/api/takeover/side")
async def side(
    production: ProductionDep,
    route: Route = None,
    thread: Annotated[str | None, Query(min_length=1, max_length=1000)] = None,
    failed: Annotated[int, Query(ge=0, le=10**6)] = 0,
) -> ThreadSide:
    """Who answers a call of this thread. `failed`: calls that the small model did not answer, since the app asked last."""
    return _takeover(production, route).side(thread, failed)


def _takeover(production: Production, route: str | None) -> Takeover:
    return production.takeovers.get(route or production.options.route)


def _small_model(production: Production, rule: TakeoverRule, route: str) -> str:
    """The small model's name with its step, so that training goes on without changing what is compared. Without one in the rule,
    it is the server's own on the gateway's route, else the model that is named as the route."""
    gateways = production.gateway is not None and production.gateway.traffic.name == route
    chosen = production.server.models.registry.resolve(
        rule.model or (production.server.options.name if gateways else route)
    )
    return f"{chosen.model}@{chosen.step}" if chosen.model != production.server.base.name else chosen.model
