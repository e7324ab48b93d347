"""The dashboard on read-only records, for `offbook ui`: no model calls, no training, no lock on the directory."""

from __future__ import annotations

from pathlib import Path

import uvicorn
from fastapi import FastAPI

import offbook
from offbook.base.terminal import echo
from offbook.http_listener.config import listener_config
from offbook.http_listener.listening import listen, url_of
from offbook.server.http.app import UnexpectedErrors, add_access_checks, add_error_answers
from offbook.server.http.auth import Guard
from offbook.server.records.database import open_records

from .site import add_pages
from .source import DashboardSource

MAX_BODY = 100_000


def view(folder: Path, host: str, port: int, key: str | None) -> None:
    """Serve the pages of a directory until Ctrl-C. Raises ConfigError."""
    records = open_records(folder)
    try:
        guard = Guard(key)
        app = build_viewer(DashboardSource(records, folder), guard)
        with listen(host, port) as listener:
            echo(f"The dashboard of {folder} is at {url_of(host, listener)} (Ctrl-C ends it)")
            uvicorn.Server(listener_config(app)).run(sockets=[listener])
    except KeyboardInterrupt:
        return
    finally:
        records.close()


def build_viewer(source: DashboardSource, guard: Guard) -> FastAPI:
    """Build the application on open records. The caller closes them."""
    app = FastAPI(title="Offbook", version=offbook.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(app, source)
    add_error_answers(app)
    add_access_checks(app, guard, MAX_BODY)
    app.add_middleware(UnexpectedErrors)
    return app
