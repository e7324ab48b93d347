"""Finds the best checkpoint of a model by a logged metric."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from offbook.base.errors import ConfigError
from offbook.base.wire import CheckpointState, LogRequest

logger = logging.getLogger("offbook")

DEFAULT_METRIC = "val/reward"
TRAIN = "train/"


def best_step(
    checkpoints: Sequence[CheckpointState], logs: Sequence[LogRequest], named: str | None
) -> LogRequest | None:
    """Return the step with the highest value of the metric, and that value; the later step wins a tie.

    `named=None` means `val/reward`. When no checkpoint has the metric, a named one raises ConfigError. The default metric
    and `train/...`, which a model's first step cannot have, are logged as a warning and return None.
    """
    metric = DEFAULT_METRIC if named is None else named
    existing = {state.step for state in checkpoints}
    values = {entry.step: entry.metrics[metric] for entry in logs if entry.step is not None and metric in entry.metrics}
    values |= _train_values(checkpoints, metric) if metric.startswith(TRAIN) else {}
    scored = {step: value for step, value in values.items() if step in existing}
    if scored:
        step = max(scored, key=lambda step: (scored[step], step))
        split = "train" if metric.startswith(TRAIN) else "val"
        return LogRequest(split=split, step=step, metrics={metric: scored[step]})
    if named is not None and not metric.startswith(TRAIN):
        known = sorted({name for entry in logs if entry.step in existing for name in entry.metrics})
        raise ConfigError(
            f"best_checkpoint_metric: no checkpoint has {named!r}; logged are {', '.join(known) or 'none'}: name one of these"
        )
    logger.warning("no checkpoint has the metric %r: only the newest step is kept", metric)
    return None


def _train_values(checkpoints: Sequence[CheckpointState], metric: str) -> dict[int, float]:
    """Values of a training metric by step.

    A checkpoint stores the metrics of the training step that created it. Their rollouts were sampled by the step before,
    so a value belongs to that earlier step.
    """
    name = metric.removeprefix(TRAIN)
    values = {state.step - 1: state.metrics.get(name, state.metrics.get(f"{name}/mean")) for state in checkpoints}
    return {step: value for step, value in values.items() if value is not None}
