"""`GET /`: all runs, most recently active first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from .rendering import Crumb, page
from .run_charts import score
from .run_status import RunStatus, status_of
from .source import DashboardSource, RunOverview, SourceDep
from .sparkline import points

router = APIRouter()

RUNS_SHOWN = 25
"""Runs on one page of the list."""
_TREND = 60  # rewards in a sparkline


@dataclass(frozen=True)
class RunLine:
    """A row of the table of runs. `trend` has the points of an SVG polyline of the last rewards."""

    run: str | None
    status: RunStatus
    models: str
    step: int | None
    rollouts: int
    reward: float | None
    change: float | None
    trend: str
    evaluation: float | None
    evaluated_at: int | None
    began: float


@router.get("/")
async def runs_page(
    request: Request, source: SourceDep, page_number: Annotated[int, Query(alias="at", ge=1, le=100_000)] = 1
) -> HTMLResponse:
    """The page of all runs. The query parameter `at` selects a page of the list."""
    rows = await source.runs()
    chosen = rows[(page_number - 1) * RUNS_SHOWN : page_number * RUNS_SHOWN]
    lines = [line_of(overview, source) for overview in await source.overviews(chosen)]
    context = {
        "lines": lines,
        "total": len(rows),
        "page_number": page_number,
        "pages": max(1, -(-len(rows) // RUNS_SHOWN)),
        "engine": source.engine,
        "folder": "/".join(source.folder.parts[-2:]),
    }
    return page(request, "runs.html", "Runs", (Crumb("Runs"),), context)


def line_of(overview: RunOverview, source: DashboardSource) -> RunLine:
    """The row of a run."""
    rewards = [update.metrics["reward/mean"] for update in overview.updates if "reward/mean" in update.metrics]
    last = next((evaluation for evaluation in reversed(overview.evaluations) if score(evaluation) is not None), None)
    steps = [update.result_step for update in overview.updates if update.result_step is not None]
    return RunLine(
        run=overview.run,
        status=status_of(overview, source.engine),
        models=", ".join(overview.models),
        step=max(steps) if steps else overview.last.step,
        rollouts=overview.row.rollouts,
        reward=rewards[-1] if rewards else overview.last.reward,
        change=_change(rewards),
        trend=points(rewards[-_TREND:], 96, 24),
        evaluation=score(last) if last is not None else None,
        evaluated_at=last.step if last is not None else None,
        began=overview.first.started_at,
    )


def _change(rewards: Sequence[float]) -> float | None:
    """The mean of the last five rewards minus the mean of the five before; fewer if there are fewer than ten."""
    if len(rewards) < 2:
        return None
    size = min(5, len(rewards) // 2)
    return sum(rewards[-size:]) / size - sum(rewards[-2 * size : -size]) / size
