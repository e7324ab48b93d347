"""The server's HTTP application over a scripted sampler, on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from understudy.config import EngineOptions, ServerOptions
from understudy.server.calls.recorder import Recorder
from understudy.server.http import app
from understudy.server.http.auth import Guard
from understudy.server.models.base_model import BaseModelPath
from understudy.server.models.model_services import open_models
from understudy.server.records.store import Store
from understudy.server.sampler.choice import EngineChoice
from understudy.server.services import Services
from understudy.server.training.archives import Archives
from understudy.server.training.history import TrainHistory
from understudy.server.training.job_folders import JobFolders
from understudy.server.training.queue import TrainQueue
from understudy.types import Call

from .scripted_sampler import ConnectedSampler, ScriptedSampler, serving


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
    store = await Store.open(f"sqlite:///{folder / 'records.db'}")
    base = BaseModelPath("tiny", folder, "tiny")
    sampler = ConnectedSampler(scripted.url)
    models = open_models(folder, base, "default", "default", sampler.adapters)
    recorder = Recorder(store)
    jobs = JobFolders(folder / "jobs", store)
    history = TrainHistory(store, models.registry, jobs)
    services = Services(
        options=ServerOptions(dir=folder),
        engine=EngineChoice("embedded", EngineOptions()),
        base=base,
        store=store,
        models=models,
        sampler=sampler,
        recorder=recorder,
        learner=None,
        training=TrainQueue(history, jobs, None),
        train_history=history,
        archives=Archives(folder / "exports"),
    )

    async with (
        serving(app.build(services, Guard(None))) as url,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
    ):
        yield Gateway(url, http, scripted, services)
    await recorder.drain()
    await sampler.stop()
    await store.close()
