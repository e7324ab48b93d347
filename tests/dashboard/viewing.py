"""The dashboard over a directory, as `offbook ui` serves it, in a thread of the tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from offbook.server.http.auth import Guard
from offbook.server.records.database import open_records
from offbook_dashboard.source import DashboardSource, EngineState
from offbook_dashboard.viewer import build_viewer
from tests.server.servers import until

R = TypeVar("R")


def from_records(folder: Path, ask: Callable[[DashboardSource], Coroutine[Any, Any, R]]) -> R:
    """What a server's directory answers. In a thread of its own: Playwright's loop may run in this one."""
    records = open_records(folder)
    try:
        with ThreadPoolExecutor(1) as apart:
            return apart.submit(lambda: asyncio.run(ask(DashboardSource(records, folder)))).result()
    finally:
        records.close()


@contextmanager
def viewing(folder: Path, key: str | None = None, engine: EngineState | None = None) -> Iterator[str]:
    """The URL of the pages of a server's directory. `engine`: what a server that runs says of itself."""
    records = open_records(folder)
    source = DashboardSource(records, folder, None if engine is None else lambda: engine)
    app = build_viewer(source, Guard(key))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started, "the dashboard serves")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        records.close()
