"""Templates to answers: Jinja2 with autoescape, and the headers that keep a page from running anything but its own files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from fastapi import Request
from fastapi.responses import HTMLResponse

from ...types import Json
from . import links, numbers

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
"""Of every page. No inline script or style, and no text of a rollout becomes markup by a slip."""

THEME = "understudy_theme"
"""The cookie that says `light` or `dark`; without it the system's theme is used."""


FILTERS = (
    *(numbers.number, numbers.fixed, numbers.signed, numbers.percent, numbers.seconds),
    *(numbers.moment, numbers.machine_moment, numbers.ago),
)
"""What templates may apply to a value, by their names."""


@dataclass(frozen=True)
class Crumb:
    """A step on the way to a page; the last one has no address."""

    text: str
    url: str | None = None


class UnknownPage(Exception):
    """There is nothing at this address; `message` says what there is."""

    def __init__(self, title: str, message: str) -> None:
        super().__init__(message)
        self.title = title
        self.message = message


def static(name: str) -> str:
    """The address of a static file."""
    return f"/pages/static/{name}"


FUNCTIONS = (links.run_url, links.step_url, links.group_url, links.trajectory_url, links.search_url, static)
"""What templates may call, by their names."""


@cache
def environment() -> jinja2.Environment:
    """The templates. Undefined names are errors; everything is escaped."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    untyped: Any = made  # jinja2 leaves the types of these two open
    untyped.filters.update({each.__name__: each for each in FILTERS})
    untyped.globals.update({each.__name__: each for each in FUNCTIONS})
    return made


def page(
    request: Request,
    template: str,
    title: str,
    crumbs: tuple[Crumb, ...],
    context: Mapping[str, Json],
    status: int = 200,
) -> HTMLResponse:
    """A whole page. `title` is its heading; `context` goes to the template beside what every page has."""
    theme = request.cookies.get(THEME, "")
    shown = {
        **context,
        "title": title,
        "crumbs": crumbs,
        "theme": theme if theme in ("light", "dark") else "",
        "access": getattr(request.state, "access", None),
        "bare": context.get("bare", False),
        "query_text": request.query_params.get("text", ""),
    }
    text = environment().get_template(template).render(shown)
    return HTMLResponse(text, status, HEADERS)
