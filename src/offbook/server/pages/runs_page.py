"""`GET /`: all runs, most recently active first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from offbook.server.views.dashboard_source import DashboardSource, RunOverview, SourceDep
from offbook.server.views.run_charts import measure, score
from offbook.server.views.run_index import ListedRun
from offbook.server.views.run_summary import RunStatus, points, status_of, trend

from .rendering import Crumb, page

router = APIRouter()

RUNS_SHOWN = 25
"""Runs on one page of the list."""
_EVALUATIONS_SHOWN = 5  # under one training; its page has all of them
_DRAWN = 60  # rewards in a sparkline


@dataclass(frozen=True)
class RunLine:
    """A row of the table of runs.

    `reward`: the mean of the last step, or of an evaluation. `change`: its trend as text. `drawn`: the points of an SVG
    polyline of the last rewards. `evaluations`: those that belong to it, newest first; `left_out` counts older ones."""

    run: str | None
    status: RunStatus
    models: str
    step: int | None
    rollouts: int
    reward: float | None
    change: str
    drawn: str
    evaluation: float | None
    measure: str
    evaluated_at: int | None
    began: float
    evaluations: tuple[RunLine, ...] = ()
    left_out: int = 0


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
        "folder": "/".join(source.folder.parts[-2:]),
    }
    return page(request, "runs.html", "Runs", (Crumb("Runs"),), context)


async def lines_of(listed: Sequence[ListedRun], source: DashboardSource) -> list[RunLine]:
    """The rows of runs, each with the newest evaluations that belong to it."""
    shown = [row for item in listed for row in (item.row, *item.evaluations[:_EVALUATIONS_SHOWN])]
    lines = {overview.run: line_of(overview, source) for overview in await source.overviews(shown)}
    return [
        replace(
            lines[item.row.run],
            evaluations=tuple(lines[row.run] for row in item.evaluations[:_EVALUATIONS_SHOWN]),
            left_out=len(item.evaluations[_EVALUATIONS_SHOWN:]),
        )
        for item in listed
    ]


def line_of(overview: RunOverview, source: DashboardSource) -> RunLine:
    """The row of a run, without those that belong to it."""
    rewards = overview.rewards
    last = next((evaluation for evaluation in reversed(overview.evaluations) if score(evaluation) is not None), None)
    steps = [update.result_step for update in overview.updates if update.result_step is not None]
    change = trend(rewards)
    return RunLine(
        run=overview.run,
        status=status_of(overview, source.engine),
        models=", ".join(overview.models),
        step=max(steps) if steps else overview.last.step,
        rollouts=overview.row.rollouts,
        reward=overview.reward,
        change="" if change is None else str(change),
        drawn=points(rewards[-_DRAWN:], 96, 24),
        evaluation=score(last) if last is not None else None,
        measure=measure(last) if last is not None else "",
        evaluated_at=last.step if last is not None else None,
        began=overview.first.started_at,
    )
