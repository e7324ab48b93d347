"""`GET /`: all runs. `GET /runs/{run}`: facts, warnings, charts and steps of a run. `GET /compare`: the charts of several runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from offbook.base.types import Json
from offbook.server.views.run_source import RunOverview
from offbook.server.views.run_summary import (
    STEPS_SHOWN,
    evaluation_lines,
    facts_of,
    lines_of,
    run_name,
    status_of,
    step_table,
    warnings_of,
)

from .page_urls import name_of, run_url, step_url
from .rendering import RUNS, SAFE, Crumb, SourceDep, UnknownPage, page
from .run_charts import chart_json
from .source import DashboardSource

router = APIRouter()

RUNS_SHOWN = 25
"""Runs on one page of the list."""
MAX_COMPARED = 6
"""Most runs on one page of comparison."""


@router.get("/")
async def runs_page(
    request: Request, source: SourceDep, page_number: Annotated[int, Query(alias="at", ge=1, le=100_000)] = 1
) -> HTMLResponse:
    """The page of all runs. The query parameter `at` selects a page of the list."""
    listed = await source.runs()
    chosen = listed[(page_number - 1) * RUNS_SHOWN : page_number * RUNS_SHOWN]
    context = {
        "lines": await lines_of(chosen, source),
        "total": len(listed),
        "page_number": page_number,
        "pages": max(1, -(-len(listed) // RUNS_SHOWN)),
        "engine": source.engine,
        "other_server": source.other_server,
        "folder": "/".join(source.folder.parts[-2:]),
    }
    return page(request, "runs.html", "Runs", (Crumb("Runs"),), context)


async def known_run(source: DashboardSource, part: str) -> RunOverview:
    """The run that a path segment names. Raises UnknownPage."""
    run = name_of(part)
    if (overview := await source.run(run)) is None:
        raise UnknownPage("Unknown run", f"There is no run {run!r} here.")
    return overview


@router.get("/runs/{run}")
async def run_page(
    request: Request, run: str, source: SourceDep, page_number: Annotated[int, Query(alias="at", ge=1, le=100_000)] = 1
) -> HTMLResponse:
    """The page of a run. The query parameter `at` selects a page of the table of steps."""
    overview = await known_run(source, run)
    headings, lines = step_table(overview)
    evaluated = await evaluation_lines(overview, source)
    context = {
        "run": overview,
        "status": status_of(overview, source),
        "facts": facts_of(overview),
        "warnings": warnings_of(overview),
        "headings": headings,
        "lines": lines[(page_number - 1) * STEPS_SHOWN : page_number * STEPS_SHOWN],
        "page_number": page_number,
        "pages": max(1, -(-len(lines) // STEPS_SHOWN)),
        "evaluated": evaluated[:STEPS_SHOWN],
        "measures_loss": any(line.loss is not None for line in evaluated),
        "data": [data_of(overview, source)],
        "config": overview.updates[-1].config if overview.updates else {},
    }
    return page(request, "run.html", run_name(overview.run), (RUNS, Crumb(run_name(overview.run))), context)


@router.get("/compare")
async def compare_page(
    request: Request, source: SourceDep, run: Annotated[tuple[str, ...], Query(max_length=50)] = ()
) -> HTMLResponse:
    """The charts of several runs in the same axes. The query parameter `run` is repeated for each run."""
    chosen = list(dict.fromkeys(run))[:MAX_COMPARED]
    overviews = [overview for name in chosen if (overview := await source.run(name)) is not None]
    missing = [name for name in chosen if name not in {overview.run for overview in overviews}]
    if not overviews:
        named = ", ".join(repr(name) for name in chosen) or "none"
        raise UnknownPage(
            "Nothing to compare", f"There is none of these runs: {named}. Tick runs on the page of all runs."
        )
    context = {
        "runs": [(overview, status_of(overview, source), facts_of(overview)) for overview in overviews],
        "missing": missing,
        "left_out": max(0, len(set(run)) - MAX_COMPARED),
        "data": [data_of(overview, source) for overview in overviews],
    }
    return page(request, "compare.html", "Compare runs", (RUNS, Crumb("Compare")), context)


@router.get("/pages/data/runs/{run}")
async def run_data(run: str, source: SourceDep) -> JSONResponse:
    """The new state of a run, as JSON. The page of an active run fetches it repeatedly."""
    overview = await known_run(source, run)
    live = {
        "facts": [asdict(fact) for fact in facts_of(overview)],
        "warnings": [asdict(warned) for warned in warnings_of(overview)],
        "lines": [
            asdict(line) | {"url": step_url(overview.run, line.from_step)}
            for line in step_table(overview)[1][:STEPS_SHOWN]
        ],
        "status": asdict(status_of(overview, source)),
    }
    return JSONResponse(data_of(overview, source) | live, headers=SAFE | {"cache-control": "no-store"})


def data_of(overview: RunOverview, source: DashboardSource) -> dict[str, Json]:
    """The charts of a run as JSON. `version` changes when there are new rollouts, updates or evaluations."""
    return {
        "run": run_name(overview.run),
        "url": run_url(overview.run),
        "active": status_of(overview, source).kind == "active",
        "live": source.served,
        "version": f"{overview.row.last}-{len(overview.updates)}-{len(overview.evaluations)}",
        **chart_json(overview),
    }
