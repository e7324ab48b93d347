"""Decides which rollouts a sink with a sampling rate shows."""

from __future__ import annotations

from offbook.base.errors import ConfigError
from offbook.base.wire import RolloutTrace

from .spans import trace_id


def is_sampled(rollout: RolloutTrace, rate: float) -> bool:
    """Whether a rollout belongs to this share. The same rollout always gives the same answer."""
    return trace_id(rollout) / 2**128 < rate


def checked_rate(rate: object, where: str) -> float:
    """Return the rate as a float. Raises ConfigError unless it is a number from 0 to 1."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigError(f"{where}: a number from 0 to 1 is needed, got {rate!r}")
    return float(rate)
