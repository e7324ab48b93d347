"""`GET /`: all runs, most recently active first."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from offbook.server.views.run_tables import lines_of
from offbook.server.views.takeover_view import small_models_part, takeover_status

from ..wing import pages_of_wings
from .rendering import Crumb, SourceDep, page

router = APIRouter()

RUNS_SHOWN = 25
"""Runs on one page of the list."""


@router.get("/")
async def runs_page(
    request: Request, source: SourceDep, page_number: Annotated[int, Query(alias="at", ge=1, le=100_000)] = 1
) -> HTMLResponse:
    """The page of all runs. The query parameter `at` selects a page of the list."""
    listed = await source.listed()
    chosen = listed[(page_number - 1) * RUNS_SHOWN : page_number * RUNS_SHOWN]
    context = {
        "lines": await lines_of(chosen, source),
        "total": sum(1 + len(item.evaluations) for item in listed),
        "page_number": page_number,
        "pages": max(1, -(-len(listed) // RUNS_SHOWN)),
        "engine": source.engine,
        "other_server": source.other_server,
        "takeovers": [(state, takeover_status(state), small_models_part(state)) for state in await source.takeovers()],
        "links": [link for wing in pages_of_wings() for link in await wing.links(source)],
        "folder": "/".join(source.folder.parts[-2:]),
    }
    return page(request, "runs.html", "Runs", (Crumb("Runs"),), context)
