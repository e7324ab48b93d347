"""The dashboard on read-only records, for `offbook ui`: no model calls, no training, no lock on the directory."""

from __future__ import annotations

from fastapi import FastAPI

import offbook
from offbook.server.views.dashboard_source import DashboardSource

from ..pages.site import add_pages
from .app import UnexpectedErrors, add_access_checks, add_error_answers
from .auth import Guard
from .sign_in import add_sign_in

MAX_BODY = 100_000


def build_viewer(source: DashboardSource, guard: Guard) -> FastAPI:
    """Build the application on open records. The caller closes them."""
    app = FastAPI(title="Offbook", version=offbook.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    add_pages(app, source)
    add_sign_in(app, guard)
    add_error_answers(app)
    add_access_checks(app, guard, MAX_BODY)
    app.add_middleware(UnexpectedErrors)
    return app
