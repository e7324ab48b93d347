"""`GET /trajectories/{id}`: a rollout, with the learner's numbers for its tokens."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from offbook.server.views.dashboard_source import DashboardSource
from offbook.server.views.page_urls import group_url, name_of, run_url, step_url
from offbook.server.views.rollout_view import RolloutView, rollout_view
from offbook.server.views.run_tables import run_name
from offbook.server.views.step_groups import group_lines
from offbook.server.views.token_view import COLOURS, Colour, advantage_words

from ...engine import checkpoint_files
from .rendering import Crumb, SourceDep, UnknownPage, page

router = APIRouter()


async def known_rollout(source: DashboardSource, part: str, colour: str | None = None) -> RolloutView:
    """The rollout that a path segment names. Raises UnknownPage if there is none."""
    trajectory_id = name_of(part) or ""
    view = await rollout_view(source, trajectory_id, colour)
    if view is None:
        raise UnknownPage("Unknown rollout", f"There is no rollout {trajectory_id!r} here.")
    return view


@router.get("/trajectories/{trajectory_id}")
async def rollout_page(
    request: Request,
    trajectory_id: str,
    source: SourceDep,
    colour: Annotated[Colour | None, Query()] = None,
) -> HTMLResponse:
    """The page of a rollout. Owners can resample its calls while an engine runs. `colour`: see `Colour`."""
    view = await known_rollout(source, trajectory_id, colour)
    access = getattr(request.state, "access", None)
    may_resample = source.engine is not None and access is not None and access.role == "owner"
    steps = await asyncio.to_thread(_steps, source, view) if may_resample else {}
    context = rollout_context(view) | {"steps": steps, "standalone": False}
    return page(request, "rollout.html", view.name, crumbs_of(view), context)


def rollout_context(view: RolloutView) -> dict[str, object]:
    """The variables of a rollout's template."""
    numbers = {call.id: number for number, call in enumerate(view.calls, 1)}
    answers = list(view.tokens.answers.values())
    return {
        "view": view,
        "record": view.record,
        "tokens": view.tokens,
        "colours": COLOURS,
        "advantage": advantage_words(view.tokens.advantages),
        "answer_numbers": {(answer.call_id, answer.index): number for number, answer in enumerate(answers)},
        "token_data": [answer.columns | {"call": numbers[answer.call_id], "why": answer.why} for answer in answers],
        "chips": [chip for line in group_lines(view.siblings) for chip in line.chips],
        "steps": {},
    }


def _steps(source: DashboardSource, view: RolloutView) -> dict[str, list[int]]:
    """For each model of the rollout, the steps with a checkpoint, newest first, and 0 for the base."""
    folders = {model: source.model_folder(model) for model in {call.model for call in view.calls}}
    return {
        model: [*checkpoint_files.steps(folder[0] / "checkpoints"), 0]
        for model, folder in folders.items()
        if folder is not None
    }


def crumbs_of(view: RolloutView) -> tuple[Crumb, ...]:
    """The breadcrumbs of a rollout: run, step and group, as far as it has them."""
    place = view.record.place if view.record is not None else None
    if place is None or place.run is None:
        return Crumb("Runs", "/"), Crumb(view.name)
    step = "No step" if place.step is None else f"Step {place.step}"
    crumbs = [
        Crumb("Runs", "/"),
        Crumb(run_name(place.run), run_url(place.run)),
        Crumb(step, step_url(place.run, place.step)),
    ]
    if place.group is not None:
        crumbs.append(Crumb(place.scenario or "Group", group_url(place.run, place.step, place.group)))
    return *crumbs, Crumb(view.name)
