"""What an evaluation's numbers are worth: pass@k, and intervals by the bootstrap. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from understudy.errors import ConfigError

RESAMPLES = 10_000
LEVEL = 0.95
_BLOCK = 4_000_000
"""Numbers that are drawn at once."""


@dataclass(frozen=True)
class Interval:
    """A mean, and the bounds that hold it with probability `level` over the choice of scenarios."""

    mean: float
    low: float
    high: float
    level: float = LEVEL


def pass_at_k(rollouts: int, successes: int, k: int) -> float:
    """The probability that at least one of `k` rollouts succeeds, unbiased from `rollouts` of which `successes` did:
    1 - C(n - c, k) / C(n, k) (2107.03374, equation 1). Raises ConfigError for a k above `rollouts`.

    Of 4 rollouts 1 succeeded: pass@1 is 1/4, and pass@2 is 1 - C(3, 2) / C(4, 2) = 1/2.
    """
    if not 1 <= k <= rollouts:
        raise ConfigError(f"pass@{k}: at least {k} scored rollouts of a scenario are needed, it has {rollouts}")
    return 1.0 - math.comb(rollouts - successes, k) / math.comb(rollouts, k)


def bootstrap_mean(
    values: Sequence[float], *, seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES
) -> Interval:
    """The mean of one value per scenario with its percentile interval: scenarios are drawn again with replacement, since
    rollouts of one scenario are no independent evidence (Efron and Tibshirani 1993, chapter 13). Raises ConfigError for no
    values. With a single one, or equal ones, the bounds are the mean: it says nothing about other scenarios."""
    if not values:
        raise ConfigError("interval: no scenario has a value")
    given = np.asarray(values, np.float64)
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // len(given))
    means: list[float] = []
    for begin in range(0, resamples, block):
        drawn = generator.integers(len(given), size=(min(block, resamples - begin), len(given)))
        means.extend(given[drawn].mean(axis=1).tolist())
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(math.fsum(values) / len(values), float(low), float(high), level)


def paired_difference(
    values: dict[str, float], baseline: dict[str, float], *, seed: int = 0, level: float = LEVEL
) -> Interval:
    """How much better `values` are than `baseline` on the scenarios that both have, by id. What makes a scenario hard is the
    same for both, so the interval is narrower than that of two means. Raises ConfigError where no scenario is shared."""
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        raise ConfigError("difference: the two evaluations share no scenario (by id): compare them on the same file")
    return bootstrap_mean([values[name] - baseline[name] for name in shared], seed=seed, level=level)
