"""The server's HTTP application over a scripted sampler, on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from offbook.base.types import Call
from offbook.server.http import app
from offbook.server.http.auth import Guard
from offbook.server.services import Services
from offbook.testing.asgi import serving
from offbook.testing.server import services_over
from tests.fakes.scripted_sampler import ScriptedSampler


@dataclass
class Gateway:
    """A server without a learner. `http` speaks to it; the rest is what it is made of."""

    url: str
    http: httpx.AsyncClient
    sampler: ScriptedSampler
    services: Services

    async def chat(self, headers: dict[str, str] | None = None, path: str = "/v1", **fields: Any) -> httpx.Response:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.http.post(f"{path}/chat/completions", json=body, headers=headers or {})

    async def calls(self, trajectory_id: str) -> tuple[Call, ...]:
        return (await self.services.store.calls_of([trajectory_id]))[trajectory_id]


@asynccontextmanager
async def gateway_over(scripted: ScriptedSampler, folder: Path) -> AsyncIterator[Gateway]:
    async with (
        services_over(scripted.url, folder) as services,
        serving(app.build(services, Guard(None))) as url,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
    ):
        yield Gateway(url, http, scripted, services)
