"""Which rollouts a sink with a sampling rate shows."""

from __future__ import annotations

from understudy.errors import ConfigError
from understudy.wire import RolloutTrace

from .spans import trace_id


def is_sampled(rollout: RolloutTrace, rate: float) -> bool:
    """Whether a rollout is in this share of all: the same one each time."""
    return trace_id(rollout) / 2**128 < rate


def checked_rate(rate: object, where: str) -> float:
    """Raise ConfigError for what is no share."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigError(f"{where}: a number from 0 to 1 is needed, got {rate!r}")
    return float(rate)
