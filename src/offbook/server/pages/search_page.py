"""`GET /search`: rollouts by run, model, step, reward, exception, tool and text. The address contains the whole query."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, ValidationError

from offbook.server.views.page_urls import search_url

from ..records.search import RolloutFilter, search
from .rendering import Crumb, SourceDep, page

router = APIRouter()

RESULTS_SHOWN = 50
"""Most results on one page."""


class SearchForm(BaseModel):
    """The form as a browser sends it. All fields are text, and "" where nothing was entered."""

    model_config = ConfigDict(frozen=True)

    text: str = ""
    run: str = ""
    model: str = ""
    split: str = ""
    scenario: str = ""
    step: str = ""
    lowest: str = ""
    highest: str = ""
    outcome: Literal["", "failed", "finished"] = ""
    exception: str = ""
    tool: str = ""

    def wanted(self) -> tuple[RolloutFilter, list[str]]:
        """The filters, and messages about invalid fields, which are left out of them."""
        faults: list[str] = []
        step = _number(self.step, "step", faults)
        if step is not None and not (0 <= step < 2**31 and step.is_integer()):
            faults.append(f"step {self.step!r} is not a whole number of at least 0")
            step = None
        wanted = RolloutFilter(
            run=self.run or None,
            model=self.model or None,
            split=self.split or None,
            scenario=self.scenario or None,
            step=int(step) if step is not None else None,
            lowest=_number(self.lowest, "lowest reward", faults),
            highest=_number(self.highest, "highest reward", faults),
            failed={"failed": True, "finished": False}.get(self.outcome),
            exception=self.exception.strip(),
            tool=self.tool.strip(),
            text=self.text.strip(),
        )
        return wanted, faults


@router.get("/search")
async def search_page(
    request: Request, source: SourceDep, after: Annotated[str, Query(pattern="^[0-9]{0,18}$")] = ""
) -> HTMLResponse:
    """The form and its results. `after` continues the results of an earlier page."""
    sent = {name: value[:500] for name, value in request.query_params.items() if name in SearchForm.model_fields}
    try:
        form = SearchForm.model_validate(sent)
    except ValidationError:
        form = SearchForm.model_validate(sent | {"outcome": ""})
    wanted, faults = form.wanted()
    start = int(after) if after else None
    results = await source.read(lambda connection: search(connection, wanted, start, RESULTS_SHOWN))
    runs = [row.run for row in (await source.runs())[:200] if row.run is not None]
    context = {
        "form": form,
        "faults": faults,
        "results": results,
        "start": start,
        "next_url": search_url({**form.model_dump(), "after": results.next}) if results.next is not None else None,
        "first_url": search_url(form.model_dump()),
        "runs": runs,
        "models": sorted({facts.name for facts in source.models()}),
    }
    return page(request, "search.html", "Search", (Crumb("Runs", "/"), Crumb("Search")), context)


def _number(text: str, name: str, faults: list[str]) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        faults.append(f"{name} {text!r} is not a number")
        return None
    if value != value:
        faults.append(f"{name} {text!r} is not a number")
        return None
    return value
