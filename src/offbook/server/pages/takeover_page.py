"""`GET /takeovers/{route}`: a route's takeover: stages, the test's intervals, every decision, and money."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from offbook.server.views.page_urls import name_of
from offbook.server.views.takeover_view import (
    decision_lines,
    intervals,
    now_line,
    stage_lines,
    takeover_facts,
    takeover_status,
)

from ..records.notes import ROUTE_NOTE, read_note
from ..records.takeover_threads import threads_by_side
from ..upstream.counts import RouteCounts, stored_counts
from .rendering import Crumb, SourceDep, UnknownPage, page

router = APIRouter()

DECISIONS_SHOWN = 50
"""Decisions on one page of the table."""


@router.get("/takeovers/{route}")
async def takeover_page(
    request: Request,
    route: str,
    source: SourceDep,
    page_number: Annotated[int, Query(alias="at", ge=1, le=100_000)] = 1,
) -> HTMLResponse:
    """The page of a route's takeover. The query parameter `at` selects a page of the decisions."""
    name = name_of(route) or ""
    states = {state.route: state for state in await source.takeovers()}
    if name not in states:
        nearest = get_close_matches(name, states, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownPage("Unknown route", f"There is no route {name!r} here.{hint}")
    state = states[name]

    def read(connection: Connection) -> tuple[RouteCounts, dict[tuple[int, bool], int]]:
        counts = read_note(connection, ROUTE_NOTE + name)
        return stored_counts(counts or "{}") or RouteCounts(), threads_by_side(connection, state.id)

    counts, threads = await source.read(read)
    decisions = decision_lines(state)
    shown = decisions[(page_number - 1) * DECISIONS_SHOWN : page_number * DECISIONS_SHOWN]
    now = now_line(state) if page_number == 1 else None
    context = {
        "state": state,
        "status": takeover_status(state),
        "facts": takeover_facts(state, counts, threads),
        "stages": stage_lines(state, threads),
        "intervals": intervals(shown if now is None else [now, *shown]),
        "decisions": shown,
        "page_number": page_number,
        "pages": max(1, -(-len(decisions) // DECISIONS_SHOWN)),
    }
    title = f"Takeover of {name}"
    return page(request, "takeover.html", title, (Crumb("Runs", "/"), Crumb(title)), context)
