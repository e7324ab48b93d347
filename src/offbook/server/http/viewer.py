"""The dashboard on read-only records, for `offbook ui`: no model calls, no training, no lock on the directory."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

import offbook
from offbook.base.errors import ConfigError
from offbook.server.views.dashboard_source import DashboardSource

from ..pages.site import add_pages
from ..records.read_only import ReadOnlyRecords
from .app import AccessChecks, UnexpectedErrors, add_error_answers
from .auth import Guard
from .sign_in import add_sign_in

MAX_BODY = 100_000


def build_viewer(source: DashboardSource, guard: Guard) -> FastAPI:
    """Build the application on open records. The caller closes them."""
    app = FastAPI(title="Offbook", version=offbook.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(app, source)
    add_sign_in(app, guard)
    add_error_answers(app)
    app.add_middleware(AccessChecks, guard=guard, max_body=MAX_BODY, origins=frozenset())
    app.add_middleware(UnexpectedErrors)
    return app


def open_records(folder: Path, store_url: str | None = None) -> ReadOnlyRecords:
    """Open the records of a server's directory. Raises ConfigError if the folder has none, StoreError."""
    if store_url is not None:
        return ReadOnlyRecords.open(store_url)
    file = folder / "records.db"
    if not file.is_file():
        raise ConfigError(_no_records(folder))
    return ReadOnlyRecords.open(f"sqlite:///{file}")


def _no_records(folder: Path) -> str:
    if not folder.exists():
        return f"there is no folder {folder}: give the directory of a server, as in --dir offbook-quickstart/server"
    inside = sorted(path.parent for pattern in ("*/records.db", "*/*/records.db") for path in folder.glob(pattern))
    hint = f"; there are records in {inside[0]}" if inside else ": it is not the directory of a server"
    return f"{folder} has no records.db{hint}"
