"""Whether a run goes on: from its train requests, its last rollout and the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from .numbers import DASH
from .source import EngineState, RunOverview

ACTIVE_SECONDS = 180.0
"""Without a rollout or an update for so long, a run is shown as ended."""


@dataclass(frozen=True)
class RunStatus:
    """`kind` is the colour, `mark` and `text` say the same without colour."""

    kind: Literal["active", "done", "failed", "quiet"]
    mark: str
    text: str


def status_of(found: RunOverview, engine: EngineState | None, now: float | None = None) -> RunStatus:
    """What a run does now. Only a running engine trains; where none runs, no run is active."""
    last = found.updates[-1] if found.updates else None
    if engine is not None:
        if engine.training is not None and any(update.id == engine.training for update in found.updates):
            return RunStatus("active", "●", "training")
        if last is not None and last.state == "queued":
            return RunStatus("active", "○", "queued")
        if (time.time() if now is None else now) - found.last.ended_at < ACTIVE_SECONDS:
            return RunStatus("active", "●", "active")
    if last is None:
        return RunStatus("quiet", DASH, "rollouts only")
    if last.state == "failed":
        return RunStatus("failed", "✕", "failed")
    if last.state != "done":
        return RunStatus("failed", "✕", "interrupted")
    return RunStatus("done", "✓", "ended")
