"""Which checkpoints are worth keeping."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..errors import ConfigError
from ..wire import CheckpointState, LogRequest

log = logging.getLogger("understudy")

DEFAULT_METRIC = "val/reward"
TRAIN = "train/"


def best_step(found: Sequence[CheckpointState], logs: Sequence[LogRequest], named: str | None) -> LogRequest | None:
    """The checkpoint that is best by a metric (None: `val/reward`), with its value; ties go to the later.

    Where no checkpoint has it, a metric that was named is a ConfigError; the default one, and `train/...`, which a model's
    first step does not have, are a warning."""
    metric = DEFAULT_METRIC if named is None else named
    existing = {state.step for state in found}
    values = {entry.step: entry.metrics[metric] for entry in logs if entry.step is not None and metric in entry.metrics}
    values |= _train_values(found, metric) if metric.startswith(TRAIN) else {}
    scored = {step: value for step, value in values.items() if step in existing}
    if scored:
        step = max(scored, key=lambda step: (scored[step], step))
        split = "train" if metric.startswith(TRAIN) else "val"
        return LogRequest(split=split, step=step, metrics={metric: scored[step]})
    if named is not None and not metric.startswith(TRAIN):
        known = sorted({name for entry in logs if entry.step in existing for name in entry.metrics})
        raise ConfigError(
            f"best_checkpoint_metric: no checkpoint has {named!r}; logged are {', '.join(known) or 'none'}"
        )
    log.warning("no checkpoint has the metric %r: only the newest step is kept", metric)
    return None


def _train_values(found: Sequence[CheckpointState], metric: str) -> dict[int, float]:
    """By step. A checkpoint's metrics are those of the step that made it: of rollouts by the step before."""
    name = metric.removeprefix(TRAIN)
    values = {state.step - 1: state.metrics.get(name, state.metrics.get(f"{name}/mean")) for state in found}
    return {step: value for step, value in values.items() if value is not None}
