"""Adds the pages to an application. A new page must be added to ROUTERS."""

from __future__ import annotations

import os

from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from . import group_page, rollout_page, run_page, step_page
from .rendering import RUNS, SAFE, STATIC, Crumb, UnknownPage, page
from .source import DashboardSource

ROUTERS = (run_page.router, step_page.router, group_page.router, rollout_page.router)


class StaticFilesOfPages(StaticFiles):
    """Scripts, styles and the icon. Browsers revalidate them each time."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Add the headers of every page to a file's response."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(SAFE | {"cache-control": "no-cache"})
        return response


def add_pages(app: FastAPI, source: DashboardSource) -> None:
    """Add the dashboard's routes to an application."""
    app.state.dashboard = source
    for router in ROUTERS:
        app.router.routes.extend(router.routes)  # as the API's, which are not made anew either
    app.mount("/pages/static", StaticFilesOfPages(directory=STATIC))
    app.add_exception_handler(UnknownPage, _unknown)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, UnknownPage)
    crumbs = (RUNS, Crumb(error.title))
    return page(request, "error.html", error.title, crumbs, {"message": error.message}, status=404)
