"""The addresses of pages. A name is one path segment, in which `/`, `~` and a leading dot become `~` and two hex digits."""

from __future__ import annotations

import re
from urllib.parse import quote

NONE = "~"
"""The segment for rollouts without a run, step or group."""


def segment(name: str | int | None) -> str:
    """Encode a name as a path segment.

    >>> segment("math/easy 1"), segment(None)
    ('math~2Feasy%201', '~')
    """
    if name is None:
        return NONE
    return quote(re.sub(r"[~/]|^\.", lambda match: f"~{ord(match[0]):02X}", str(name)), safe="")


def name_of(part: str) -> str | None:
    """Decode a path segment whose percent-encoding the server has decoded already.

    >>> name_of("math~2Feasy 1"), name_of("~")
    ('math/easy 1', None)
    """
    if part == NONE:
        return None
    return re.sub(r"~([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), part)


def number_of(part: str) -> int | None:
    """Decode the path segment of a step. Raises ValueError if it is neither a number nor `~`."""
    return None if part == NONE else int(part)


def run_url(run: str | None) -> str:
    """The page of a run."""
    return f"/runs/{segment(run)}"


def step_url(run: str | None, step: int | None) -> str:
    """The page of a step."""
    return f"{run_url(run)}/steps/{segment(step)}"


def group_url(run: str | None, step: int | None, group: str | None) -> str:
    """The page of a group."""
    return f"{step_url(run, step)}/groups/{segment(group)}"


def trajectory_url(trajectory_id: str) -> str:
    """The page of a rollout."""
    return f"/trajectories/{segment(trajectory_id)}"
