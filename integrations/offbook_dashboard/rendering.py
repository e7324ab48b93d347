"""Renders templates with Jinja2, with automatic escaping and headers that allow only the package's own scripts and styles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import jinja2
from fastapi import Depends, Request
from fastapi.responses import HTMLResponse

from offbook.base.types import Json
from offbook.server.views import numbers
from offbook.server.views.run_summary import run_name

from . import page_urls
from .source import DashboardSource

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
HEADERS = SAFE | {"content-security-policy": POLICY, "cache-control": "no-store"}
"""The headers of every page. They forbid inline scripts and styles, so text of a rollout cannot run even if unescaped."""

THEME = "offbook_theme"
"""The cookie with the theme, `light` or `dark`. Without it, pages use the system's theme."""

FILTERS = (
    *(numbers.number, numbers.fixed, numbers.signed, numbers.percent, numbers.seconds),
    *(numbers.moment, numbers.machine_moment, numbers.ago),
)
"""The filters of templates, by their names."""


@dataclass(frozen=True)
class Crumb:
    """A breadcrumb. The last one, the page itself, has no address."""

    text: str
    url: str | None = None


RUNS = Crumb("Runs", "/")


def run_crumbs(run: str | None, *below: Crumb) -> tuple[Crumb, ...]:
    """The breadcrumbs of a page below a run."""
    return RUNS, Crumb(run_name(run), page_urls.run_url(run)), *below


def step_crumb(run: str | None, step: int | None) -> Crumb:
    """The breadcrumb of a step."""
    return Crumb("No step" if step is None else f"Step {step}", page_urls.step_url(run, step))


class UnknownPage(Exception):
    """There is no page at this address: a 404 page with this title and message."""

    def __init__(self, title: str, message: str) -> None:
        super().__init__(message)
        self.title = title
        self.message = message


def static(name: str) -> str:
    """The address of a static file."""
    return f"/pages/static/{name}"


FUNCTIONS = (
    page_urls.run_url,
    page_urls.step_url,
    page_urls.group_url,
    page_urls.trajectory_url,
    static,
)
"""The functions that templates can call, by their names."""


@cache
def environment() -> jinja2.Environment:
    """The templates. They escape all values, and an undefined name is an error."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    untyped: Any = templates  # jinja2 does not type filters and globals
    untyped.filters.update({function.__name__: function for function in FILTERS})
    untyped.globals.update({function.__name__: function for function in FUNCTIONS})
    return templates


def page(
    request: Request,
    template: str,
    title: str,
    crumbs: tuple[Crumb, ...],
    context: Mapping[str, Json],
    status: int = 200,
) -> HTMLResponse:
    """Render a page. `title` is its heading, `context` the template's own variables."""
    theme = request.cookies.get(THEME, "")
    shown = {
        **context,
        "title": title,
        "crumbs": crumbs,
        "theme": theme if theme in ("light", "dark") else "",
    }
    text = environment().get_template(template).render(shown)
    return HTMLResponse(text, status, HEADERS)


async def _source_of(request: Request) -> DashboardSource:
    return request.app.state.dashboard


SourceDep = Annotated[DashboardSource, Depends(_source_of)]
