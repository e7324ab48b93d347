"""Addresses of pages. A name is one path segment: `/`, `~` and a leading dot are written as `~` and two hex digits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, urlencode

NONE = "~"
"""The segment of rollouts that name no run, step or group."""


def segment(name: str | int | None) -> str:
    """A name as a segment of a path."""
    if name is None:
        return NONE
    return quote(re.sub(r"[~/]|^\.", lambda found: f"~{ord(found[0]):02X}", str(name)), safe="")


def name_of(part: str) -> str | None:
    """The name of a segment that the server has unquoted."""
    if part == NONE:
        return None
    return re.sub(r"~([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), part)


def number_of(part: str) -> int | None:
    """The step of a segment. Raises ValueError where it is neither a number nor `~`."""
    return None if part == NONE else int(part)


def runs_url() -> str:
    return "/"


def run_url(run: str | None) -> str:
    return f"/runs/{segment(run)}"


def step_url(run: str | None, step: int | None) -> str:
    return f"{run_url(run)}/steps/{segment(step)}"


def group_url(run: str | None, step: int | None, group: str | None) -> str:
    return f"{step_url(run, step)}/groups/{segment(group)}"


def trajectory_url(trajectory_id: str) -> str:
    return f"/trajectories/{segment(trajectory_id)}"


def search_url(filters: Mapping[str, str | int | float | None]) -> str:
    """The search page with these filters; None leaves one out."""
    chosen = {name: value for name, value in filters.items() if value is not None and value != ""}
    return "/search" + (f"?{urlencode(chosen)}" if chosen else "")
