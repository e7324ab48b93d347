"""The real server over an acting sampler, in a thread with its own event loop: for clients that block theirs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from understudy.server.http import app
from understudy.server.http.auth import Guard
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
    failures: list[BaseException] = []
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        try:
            async with (
                serving(sampler) as sampler.url,
                gateway_over(sampler, folder) as gateway,  # type: ignore[arg-type]  # it asks for the URL only
                like_the_server(app.build(gateway.services, Guard(None))) as url,
            ):
                urls.append(url)
                ready.set()
                await asyncio.to_thread(over.wait)
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="served-gateway")
    thread.start()
    try:
        assert ready.wait(60), "the server did not start within 60 s"
        assert urls, f"the server did not start: {failures!r}"
        with httpx.Client(base_url=urls[0], timeout=60, trust_env=False) as http:
            yield ServedGateway(urls[0], sampler, http)
    finally:
        over.set()
        thread.join(30)
    if failures:
        raise failures[0]


@asynccontextmanager
async def like_the_server(application: Any) -> AsyncIterator[str]:
    """Serve an application as the server does: connections are kept for longer than clients keep them."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    serving_it = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"  # the socket listens already
    finally:
        server.should_exit = True
        await serving_it
        listener.close()
