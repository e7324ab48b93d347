"""Which checkpoints are worth keeping."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..wire import CheckpointState, LogRequest

log = logging.getLogger("understudy")


def spared_steps(found: Sequence[CheckpointState], logs: Sequence[LogRequest], metric: str) -> set[int]:
    """The newest step and the best one by `metric`; ties go to the later. A metric that no existing checkpoint has is
    logged as a warning, and only the newest is spared."""
    if not found:
        return set()
    newest = max(state.step for state in found)
    existing = {state.step for state in found}
    values = {entry.step: entry.metrics[metric] for entry in logs if entry.step is not None and metric in entry.metrics}
    if metric.startswith("train/"):
        # A checkpoint's metrics are those of the step that made it: of rollouts by the step before.
        name = metric.removeprefix("train/")
        for state in found:
            value = state.metrics.get(name, state.metrics.get(f"{name}/mean"))
            if value is not None:
                values[state.step - 1] = value
    scored = {step: value for step, value in values.items() if step in existing}
    if not scored:
        log.warning("no checkpoint has the metric %r: only the newest step, %d, is kept", metric, newest)
        return {newest}
    return {newest, max(scored, key=lambda step: (scored[step], step))}
