"""`GET /`: every run, the one that was active last first."""

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
_TREND = 60


@dataclass(frozen=True)
class RunLine:
    """A run as the table shows it. `trend`: points of a line over the last rewards, for SVG; "" where there is none."""

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
    request: Request, source: SourceDep, at: Annotated[int, Query(ge=1, le=100_000)] = 1
) -> HTMLResponse:
    """`at`: which page of the list."""
    rows = await source.runs()
    chosen = rows[(at - 1) * RUNS_SHOWN : at * RUNS_SHOWN]
    lines = [line_of(found, source) for found in await source.overviews(chosen)]
    context = {
        "lines": lines,
        "total": len(rows),
        "at": at,
        "pages": max(1, -(-len(rows) // RUNS_SHOWN)),
        "engine": source.engine,
        "folder": "/".join(source.folder.parts[-2:]),
    }
    return page(request, "runs.html", "Runs", (Crumb("Runs"),), context)


def line_of(found: RunOverview, source: DashboardSource) -> RunLine:
    """A run as a line of the table."""
    rewards = [update.metrics["reward/mean"] for update in found.updates if "reward/mean" in update.metrics]
    last = next((each for each in reversed(found.evaluations) if score(each) is not None), None)
    steps = [update.result_step for update in found.updates if update.result_step is not None]
    return RunLine(
        run=found.run,
        status=status_of(found, source.engine),
        models=", ".join(found.models),
        step=max(steps) if steps else found.last.step,
        rollouts=found.row.rollouts,
        reward=rewards[-1] if rewards else found.last.reward,
        change=_change(rewards),
        trend=points(rewards[-_TREND:], 96, 24),
        evaluation=score(last) if last is not None else None,
        evaluated_at=last.step if last is not None else None,
        began=found.first.started_at,
    )


def _change(rewards: Sequence[float]) -> float | None:
    """The mean of the last five rewards, compared with the five before."""
    if len(rewards) < 2:
        return None
    size = min(5, len(rewards) // 2)
    return sum(rewards[-size:]) / size - sum(rewards[-2 * size : -size]) / size
