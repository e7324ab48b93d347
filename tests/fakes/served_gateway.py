"""The real server over an acting sampler, in a thread with its own event loop: for clients that block theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from understudy.types import Call
from understudy.wire import TrajectoryWithCalls

from .acting_sampler import ActingSampler, Policy
from .gateway import gateway_over
from .scripted_sampler import serving


@dataclass
class ServedGateway:
    """`url` is the server's; `sampler` is the scripted model behind it."""

    url: str
    sampler: ActingSampler
    http: httpx.Client

    def calls(self, trajectory_id: str) -> tuple[Call, ...]:
        """What the server recorded under an id, in order of start; empty where it knows nothing."""
        answer = self.http.get(f"/api/trajectories/{trajectory_id}")
        if answer.status_code == 404:
            return ()
        answer.raise_for_status()
        found = TrajectoryWithCalls.model_validate_json(answer.content).calls
        return tuple(sorted(found, key=lambda call: call.started_at))


@contextmanager
def served_gateway(policy: Policy, folder: Path) -> Generator[ServedGateway]:
    """Serve on a free port until the block ends."""
    sampler = ActingSampler(policy)
    urls: list[str] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        try:
            async with serving(sampler) as sampler.url, gateway_over(sampler, folder) as gateway:  # type: ignore[arg-type]
                urls.append(gateway.url)
                ready.set()
                await asyncio.to_thread(over.wait)
        finally:
            ready.set()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="served-gateway")
    thread.start()
    try:
        assert ready.wait(60), "the server did not start within 60 s"
        with httpx.Client(base_url=urls[0], timeout=60, trust_env=False) as http:
            yield ServedGateway(urls[0], sampler, http)
    finally:
        over.set()
        thread.join(30)
