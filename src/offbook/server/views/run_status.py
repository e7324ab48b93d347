"""Determines the status of a run from its train requests, its last rollout and the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from .dashboard_source import EngineState, RunOverview
from .numbers import DASH

ACTIVE_SECONDS = 180.0
"""A run without a new rollout or update for this long is shown as ended."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. `kind` selects a colour; `mark` and `text` express the same without colour."""

    kind: Literal["active", "done", "failed", "quiet"]
    mark: str
    text: str


def status_of(overview: RunOverview, engine: EngineState | None, now: float | None = None) -> RunStatus:
    """The status of a run at `now` (unix seconds, by default the current time). Without an engine no run is active."""
    last = overview.updates[-1] if overview.updates else None
    if engine is not None:
        if engine.training is not None and any(update.id == engine.training for update in overview.updates):
            return RunStatus("active", "●", "training")
        if last is not None and last.state == "queued":
            return RunStatus("active", "○", "queued")
        if (time.time() if now is None else now) - overview.last.ended_at < ACTIVE_SECONDS:
            return RunStatus("active", "●", "active")
    if last is None:
        return RunStatus("quiet", DASH, "evaluation" if overview.is_evaluation else "not trained")
    if last.state == "failed":
        return RunStatus("failed", "✕", "failed")
    if last.state != "done":
        return RunStatus("failed", "✕", "interrupted")
    return RunStatus("done", "✓", "ended")
