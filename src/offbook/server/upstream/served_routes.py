"""The routes of a server by name: the gateway's, and those of apps that ask their paid models themselves."""

from __future__ import annotations

from ..errors import ApiError
from ..services import Services
from ..takeover.takeover import Takeover
from .traffic import RouteTraffic


def takeovers(services: Services) -> list[Takeover]:
    """The takeover of each route."""
    own = [] if services.upstream is None else [services.upstream.takeover]
    return [*own, *(route.takeover for route in services.app_routes)]


def traffics(services: Services) -> list[RouteTraffic]:
    """What went through each route."""
    own = [] if services.upstream is None else [services.upstream.traffic]
    return [*own, *(route.traffic for route in services.app_routes)]


def is_gateways(services: Services, route: str) -> bool:
    """Whether the calls of a route pass through this server."""
    return services.upstream is not None and services.upstream.traffic.name == route


def default_route(services: Services) -> str:
    """The route of a request that names none: the gateway's, else the only one, else that of --route."""
    names = [takeover.state.route for takeover in takeovers(services)]
    return names[0] if services.upstream is not None or len(names) == 1 else services.options.route


def takeover_of(services: Services, route: str | None) -> Takeover:
    """The takeover of a route; None: the gateway's, else that of the only route. Raises ApiError 404."""
    known = {takeover.state.route: takeover for takeover in takeovers(services)}
    if not known:
        raise ApiError(
            404, "this server has no route: start it with --upstream, or deploy an app on it", code="no_upstream"
        )
    name = default_route(services) if route is None else route
    if name not in known:
        what = "name a route" if route is None else f"no route {route!r}"
        raise ApiError(404, f"{what}: this server has {', '.join(sorted(known))}", code="unknown_route")
    return known[name]
