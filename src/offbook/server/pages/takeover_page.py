"""`GET /takeovers/{route}`: a route's takeover: what it rests on now, every decision, and what the paid model cost."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from offbook.server.views.numbers import number
from offbook.server.views.page_urls import name_of, segment
from offbook.server.views.run_summary import Fact

from ..errors import ApiError
from ..records.takeover_threads import threads_by_side
from ..services import ServicesDep
from ..takeover.takeover import Takeover
from .rendering import Crumb, UnknownPage, page

router = APIRouter()

DECISIONS_SHOWN = 50


def link(takeover: Takeover) -> tuple[str, str]:
    """The text of the link to a takeover's page, and its URL."""
    state = takeover.state
    small = f", {state.model} answers {100 * state.share:g} % of new threads" if state.active else ""
    return f"Route {state.route}: {state.status}{small}", f"/takeovers/{segment(state.route)}"


@router.get("/takeovers/{route}")
async def takeover_page(request: Request, route: str, services: ServicesDep) -> HTMLResponse:
    """The page of a route's takeover."""
    name = name_of(route) or ""
    try:
        state = services.takeovers.get(name).current()
    except ApiError as error:
        raise UnknownPage("Unknown route", str(error)) from error
    threads = await services.store.read(lambda connection: threads_by_side(connection, state.id))
    facts = list[Fact]()
    if state.status != "none":
        facts += [
            Fact("Small model has", f"{100 * state.share:g} %", "of new threads"),
            Fact("Threads", f"{number(threads.get(True, 0))} small", f"{number(threads.get(False, 0))} paid"),
        ]
    if services.upstream is not None and services.upstream.traffic.name == name:
        counts = services.upstream.traffic.counts
        facts += [
            Fact("Paid model's calls", number(counts.calls), f"{number(counts.failed)} failed"),
            Fact("Paid", f"{number(counts.cost)} USD", f"{number(counts.unpriced)} calls without a known price"),
        ]
    decisions = state.decisions[: -DECISIONS_SHOWN - 1 : -1]
    title = f"Takeover of {name}"
    context = {"state": state, "facts": facts, "decisions": decisions}
    return page(request, "takeover.html", title, (Crumb("Runs", "/"), Crumb(title)), context)
