"""`GET /takeovers/{route}`: a route's takeover: what it rests on now, every decision, and what the paid model cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from offbook.server.records.notes import notes_under, read_note
from offbook.server.views.numbers import number
from offbook.server.views.run_summary import Fact
from offbook_dashboard.page_urls import name_of, segment
from offbook_dashboard.rendering import Crumb, SourceDep, UnknownPage, page
from offbook_dashboard.source import DashboardSource
from offbook_dashboard.wing_pages import PageLink, WingPages

from .takeover import TAKEOVER_NOTE, stored_takeover
from .takeover_threads import threads_by_side
from .traffic import ROUTE_NOTE, RouteCounts, stored_counts
from .wing import ProductionWing
from .wire import TakeoverState

router = APIRouter()

DECISIONS_SHOWN = 50


class ProductionPages(WingPages):
    """The page of each route, and its line on the first page."""

    router: ClassVar[APIRouter] = router
    templates: ClassVar[Path] = Path(__file__).parent / "templates"

    @classmethod
    async def links(cls, source: DashboardSource) -> Sequence[PageLink]:
        """A line for each route."""
        lines: list[PageLink] = []
        for state in await source.read(_states):
            small = f", {state.model} answers {100 * state.share:g} % of new threads" if state.active else ""
            url = f"/takeovers/{segment(state.route)}"
            lines.append(PageLink("Route", state.route, url, note=state.status.replace("_", " ") + small))
        return lines


def _states(connection: Connection) -> list[TakeoverState]:
    """The takeover of each route, in order of their names."""
    states = {name: TakeoverState(route=name) for name in notes_under(connection, ROUTE_NOTE)}
    for name, text in notes_under(connection, TAKEOVER_NOTE).items():
        states[name] = stored_takeover(text) or TakeoverState(route=name)
    return [state for _, state in sorted(states.items())]


@router.get("/takeovers/{route}")
async def takeover_page(request: Request, route: str, source: SourceDep) -> HTMLResponse:
    """The page of a route's takeover. Of a running server, with the numbers of now."""
    name = name_of(route) or ""

    def read(connection: Connection) -> tuple[list[TakeoverState], RouteCounts | None, dict[bool, int]]:
        states = [state for state in _states(connection) if state.route == name]
        counts = read_note(connection, ROUTE_NOTE + name)
        threads = threads_by_side(connection, states[0].id) if states else {}
        return states, None if counts is None else stored_counts(counts) or RouteCounts(), threads

    states, counts, threads = await source.read(read)
    if (services := getattr(request.app.state, "services", None)) is not None and ProductionWing.name in services.wings:
        states = [one.current() for one in ProductionWing.of(request).takeovers if one.state.route == name] or states
    if not states:
        raise UnknownPage("Unknown route", f"There is no route {name!r} here.")
    [state] = states
    facts = list[Fact]()
    if state.status != "none":
        facts += [
            Fact("Small model has", f"{100 * state.share:g} %", "of new threads"),
            Fact("Threads", f"{number(threads.get(True, 0))} small", f"{number(threads.get(False, 0))} paid"),
        ]
    if counts is not None:
        facts += [
            Fact("Paid model's calls", number(counts.calls), f"{number(counts.failed)} failed"),
            Fact("Paid", f"{number(counts.cost)} USD", f"{number(counts.unpriced)} calls without a known price"),
        ]
    decisions = state.decisions[: -DECISIONS_SHOWN - 1 : -1]
    title = f"Takeover of {name}"
    context = {"state": state, "facts": facts, "decisions": decisions}
    return page(request, "takeover.html", title, (Crumb("Runs", "/"), Crumb(title)), context)
