"""The part of a running server that stands before a paid model: its gateway, its takeovers, and feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Request
from sqlalchemy import MetaData
from starlette.types import ASGIApp

from offbook.base.errors import ConfigError
from offbook.base.http_access import is_loopback
from offbook.server.wing import ServerDoor, ServerWing

from .gateway.address import upstream_model
from .gateway.passing import RouteCalls, UpstreamGateway
from .gateway.traffic import RecordingPolicy, RouteTraffic
from .options import ProductionOptions
from .records.feedback import keep_feedback
from .records.takeover_threads import metadata
from .takeover.takeover import Takeovers


class Production(ServerWing):
    """The gateway before the paid model (None without --upstream), and the takeovers of all routes."""

    name: ClassVar[str] = "production"
    tables: ClassVar[MetaData | None] = metadata

    def __init__(self, options: Any, server: ServerDoor) -> None:
        super().__init__(options or ProductionOptions(), server)
        self.options: ProductionOptions
        self.gateway: UpstreamGateway | None = None
        self.takeovers = Takeovers(server.store)

    async def open(self) -> None:
        """Go on with the takeovers of the records, and connect to the paid model."""
        self.server.store.before_finish.append(keep_feedback)
        await self.takeovers.open()
        options, server = self.options, self.server
        if options.upstream is None:
            return
        model = upstream_model(options.upstream)
        if model.key is None and (server.options.api_key is not None or not is_loopback(server.options.host)):
            raise ConfigError(
                f"--upstream {options.upstream}: clients send this server's key, so it needs the provider's: set "
                "OPENAI_API_KEY or the like, or name a variable with ?api_key_variable=NAME"
            )
        policy = RecordingPolicy(
            options.record_share, options.record_days, options.record_mb * 1e6, keep_personal=options.keep_personal
        )
        traffic = RouteTraffic(options.route, model, policy, server.store, server.recorder.sampled)
        await traffic.open()
        self.gateway = UpstreamGateway(traffic, await self.takeovers.opened(options.route))

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Calls below /r/ROUTE/ pass to the paid model, before the server's own routing."""
        return RouteCalls(app, self.gateway, self.server.sampler)

    def ready_rows(self, url: str) -> Sequence[tuple[str, str]]:
        """Where the app's calls go."""
        if self.gateway is None:
            return ()
        share = self.options.record_share
        recorded = f"{100 * share:.4g} % of its threads are recorded" if share else "counted, nothing recorded"
        model = self.gateway.upstream.text
        return [("route", f"{url}/r/{self.options.route} -> {model}, {recorded}")]

    def answers_without_sampler(self) -> bool:
        """With a paid model: calls pass to it all the same."""
        return self.gateway is not None

    async def close(self, deadline: float) -> None:
        """Finish reading and recording, and store what is not stored."""
        if self.gateway is not None:
            await self.gateway.close()
        await self.takeovers.close()


async def _of_request(request: Request) -> Production:
    """Async, since FastAPI calls plain functions in a thread."""
    return Production.of(request)


ProductionDep = Annotated[Production, Depends(_of_request)]
