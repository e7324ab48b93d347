"""A server before a scripted paid provider, on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook.base.wire import RolloutTrace, TracePage
from offbook.http_listener.config import listener_config
from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.server.services import Services
from offbook.testing.asgi import serving
from offbook.testing.server import services_over
from offbook_production.options import ProductionOptions
from offbook_production.passing import UpstreamGateway
from offbook_production.takeover import Takeover
from offbook_production.traffic import RouteState, RouteTraffic
from offbook_production.upstream import upstream_model
from offbook_production.wing import ProductionWing
from tests.fakes.paid_api import PaidApi
from tests.fakes.scripted_sampler import ScriptedSampler, scripted_sampler
from tests.server.conftest import gateway as gateway
from tests.server.records.conftest import store as store


@dataclass
class Passing:
    """A server whose route `desk` leads to `paid`; `http` speaks to the route."""

    url: str
    http: httpx.AsyncClient
    paid: PaidApi
    services: Services
    gateway: UpstreamGateway
    sampler: ScriptedSampler

    async def chat(self, text: str = "Where is box 4821?", thread: str | None = None, **body: Any) -> httpx.Response:
        asked = {"model": "gpt-4.1", "messages": [{"role": "user", "content": text}]} | body
        headers = {"x-offbook-thread": thread} if thread else {}
        return await self.http.post("/v1/chat/completions", json=asked, headers=headers)

    async def settled(self) -> None:
        """Wait until every call that was answered is read. Its client has the answer a moment before it is noted."""
        await self.http.get(f"{self.url}/api/routes")
        await self.gateway.traffic.settled()

    async def state(self) -> RouteState:
        await self.settled()
        [state] = (await self.http.get(f"{self.url}/api/routes")).json()
        return RouteState.model_validate(state)

    async def threads(self) -> list[RolloutTrace]:
        await self.settled()
        answer = await self.http.get(f"{self.url}/api/traces", params={"run": "route/desk"})
        return list(TracePage.model_validate_json(answer.content).rollouts)


Opening = Callable[..., AbstractAsyncContextManager[Passing]]


@pytest.fixture
def passing(tmp_path: Path) -> Opening:
    @asynccontextmanager
    async def opened(
        share: float = 1.0,
        model: str = "openai/gpt-4.1",
        guard: Guard | None = None,
        environ: dict[str, str] | None = None,
        **policy: Any,
    ) -> AsyncIterator[Passing]:
        paid = PaidApi()
        version = "/v1" if model.startswith("openai/") else ""
        async with (
            serving(paid) as upstream,
            scripted_sampler() as sampler,
            services_over(sampler.url, tmp_path) as services,
        ):
            written = model if "?" in model else f"{model}?api_base={upstream}{version}"
            address = upstream_model(written, environ or {})
            options = ProductionOptions(route="desk", record_share=share, **policy)
            traffic = RouteTraffic(options, address, services.store, services.recorder.sampled)
            await traffic.open()
            production = services.wings["production"]
            assert isinstance(production, ProductionWing)
            production.options = options
            takeover = Takeover("desk", services.store)
            await takeover.open()
            gateway = production.gateway = UpstreamGateway(traffic, takeover)
            application = app.build(services, guard or Guard(None))
            async with (
                serving(application, listener_config(application)) as url,
                httpx.AsyncClient(base_url=f"{url}/r/desk", timeout=20, trust_env=False) as http,
            ):
                yield Passing(url, http, paid, services, gateway, sampler)

    return opened
