"""`GET /runs/{run}`: facts, warnings, charts and steps of a run; `/compare` the charts of several."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from ...types import Json
from .links import name_of, run_url, step_url
from .numbers import fixed, number, percent, seconds
from .rendering import SAFE, Crumb, UnknownPage, page
from .run_charts import chart_json, saved_by_tree
from .run_facts import facts_of, warnings_of
from .run_status import status_of
from .source import DashboardSource, RunOverview, SourceDep
from .updates import TrainUpdate

router = APIRouter()

HEADINGS = ("Reward", "Spread", "Groups trained", "Trained tokens", "Tree saves", "Clipped", "Entropy", "KL", "Seconds")
"""Of the cells of a StepLine."""
STEPS_SHOWN = 50
MOST_COMPARED = 6


@dataclass(frozen=True)
class StepLine:
    """An update as the table of steps shows it, its numbers as text. `url` leads to the rollouts that it learned from."""

    step: str
    url: str
    cells: tuple[str, ...]
    state: str


def run_name(run: str | None) -> str:
    """What a run is called on pages."""
    return "Rollouts without a run" if run is None else run


async def known_run(source: DashboardSource, part: str) -> RunOverview:
    """The run of a segment of an address. Raises UnknownPage, which names the nearest."""
    run = name_of(part)
    found = await source.run(run)
    if found is None:
        names = [row.run for row in await source.runs() if row.run is not None]
        nearest = get_close_matches(run or "", names, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownPage("Unknown run", f"There is no run {run!r} here.{hint}")
    return found


@router.get("/runs/{run}")
async def run_page(
    request: Request, run: str, source: SourceDep, at: Annotated[int, Query(ge=1, le=100_000)] = 1
) -> HTMLResponse:
    """`at`: which page of the table of steps."""
    found = await known_run(source, run)
    lines = step_lines(found)
    evaluated = [row for row in await source.steps(found.run) if row.split != "train"]
    context = {
        "run": found,
        "status": status_of(found, source.engine),
        "facts": facts_of(found),
        "warnings": warnings_of(found),
        "headings": HEADINGS,
        "lines": lines[(at - 1) * STEPS_SHOWN : at * STEPS_SHOWN],
        "at": at,
        "pages": max(1, -(-len(lines) // STEPS_SHOWN)),
        "evaluated": evaluated[:STEPS_SHOWN],
        "data": [data_of(found, source)],
        "config": found.updates[-1].config if found.updates else {},
    }
    return page(request, "run.html", run_name(found.run), (Crumb("Runs", "/"), Crumb(run_name(found.run))), context)


@router.get("/compare")
async def compare_page(
    request: Request, source: SourceDep, run: Annotated[tuple[str, ...], Query(max_length=50)] = ()
) -> HTMLResponse:
    """The charts of several runs, one above the other."""
    chosen = list(dict.fromkeys(run))[:MOST_COMPARED]
    found = [each for name in chosen if (each := await source.run(name)) is not None]
    missing = [name for name in chosen if name not in {each.run for each in found}]
    if not found:
        named = ", ".join(repr(name) for name in chosen) or "none"
        raise UnknownPage("Nothing to compare", f"None of these runs is here: {named}. Tick some on the page of runs.")
    context = {
        "runs": [(each, status_of(each, source.engine), facts_of(each)) for each in found],
        "missing": missing,
        "left_out": max(0, len(set(run)) - MOST_COMPARED),
        "data": [data_of(each, source) for each in found],
    }
    return page(request, "compare.html", "Compare runs", (Crumb("Runs", "/"), Crumb("Compare")), context)


@router.get("/pages/data/runs/{run}")
async def run_data(run: str, source: SourceDep) -> JSONResponse:
    """What a page of a run that goes on asks for again and again."""
    found = await known_run(source, run)
    live = {
        "facts": [asdict(fact) for fact in facts_of(found)],
        "warnings": [asdict(warned) for warned in warnings_of(found)],
        "lines": [asdict(line) for line in step_lines(found)[:STEPS_SHOWN]],
        "status": asdict(status_of(found, source.engine)),
    }
    return JSONResponse(data_of(found, source) | live, headers=SAFE | {"cache-control": "no-store"})


def data_of(found: RunOverview, source: DashboardSource) -> dict[str, Json]:
    """The charts of a run; `version` changes when there is something new."""
    return {
        "run": run_name(found.run),
        "url": run_url(found.run),
        "active": status_of(found, source.engine).kind == "active",
        "live": source.engine is not None,
        "version": f"{found.row.last}-{len(found.updates)}-{len(found.evaluations)}",
        **chart_json(found),
    }


def step_lines(found: RunOverview) -> list[StepLine]:
    """A line for each update, the newest first."""
    return [_line(found.run, update) for update in reversed(found.updates)]


def _line(run: str | None, update: TrainUpdate) -> StepLine:
    metrics = update.metrics
    trained, total = metrics.get("groups/trained"), metrics.get("groups/total")
    cells = (
        fixed(metrics.get("reward/mean"), 3),
        fixed(metrics.get("reward/std"), 3),
        f"{number(trained)} of {number(total)}",
        number(metrics.get("tokens/trained")),
        percent(saved_by_tree(update)),
        percent(metrics.get("clip_fraction"), 1),
        number(metrics.get("entropy")),
        number(metrics.get("kl/sampler_learner")),
        seconds(metrics.get("seconds/total")),
    )
    step = number(update.result_step) if update.result_step is not None else f"from {number(update.step)}"
    state = "" if update.applied else "nothing learned" if update.state == "done" else update.state
    return StepLine(step, step_url(run, update.step), cells, state)
