"""`GET /runs/{run}/steps/{step}/groups/{group}`: the rollouts of a group, side by side."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from offbook.server.views.dashboard_source import DashboardSource
from offbook.server.views.group_view import SIDES, GroupView, group_view
from offbook.server.views.page_urls import name_of, run_url, step_url
from offbook.server.views.run_tables import run_name
from offbook.server.views.token_view import diverging

from .rendering import Crumb, SourceDep, UnknownPage, page

router = APIRouter()


async def known_group(source: DashboardSource, run: str, group: str) -> GroupView:
    """The group that two path segments name. Raises UnknownPage if there is none."""
    name = name_of(group)
    view = await group_view(source, name_of(run), name) if name is not None else None
    if view is None:
        raise UnknownPage("Unknown group", f"There is no group {name!r} in the run {name_of(run)!r}.")
    return view


@router.get("/runs/{run}/steps/{step}/groups/{group}")
async def group_page(request: Request, run: str, step: str, group: str, source: SourceDep) -> HTMLResponse:
    """The page of a group. `step` is only part of the address."""
    del step
    view = await known_group(source, run, group)
    context = group_context(view) | {"standalone": False}
    return page(request, "group.html", title_of(view), crumbs_of_group(view), context)


def group_context(view: GroupView) -> dict[str, object]:
    """The variables of a group's template."""
    best_first = sorted(view.sides, key=lambda side: (side.row.reward is None, -(side.row.reward or 0.0), side.number))
    return {"view": view, "diverging": diverging, "beside": best_first[:SIDES]}


def title_of(view: GroupView) -> str:
    """The title of a group: its scenario, or its id without one."""
    return view.scenario or view.group


def crumbs_of_group(view: GroupView) -> tuple[Crumb, ...]:
    """The breadcrumbs of a group: run, step, group."""
    return (
        Crumb("Runs", "/"),
        Crumb(run_name(view.run), run_url(view.run)),
        Crumb("No step" if view.step is None else f"Step {view.step}", step_url(view.run, view.step)),
        Crumb(title_of(view)),
    )
