"""Statistics of evaluations: pass@k and bootstrap confidence intervals. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbook.base.errors import ConfigError

RESAMPLES = 10_000
LEVEL = 0.95
_BLOCK = 4_000_000
"""Random numbers drawn per block, to bound the memory."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval of level `level` over the choice of scenarios."""

    mean: float
    low: float
    high: float
    level: float = LEVEL

    def text(self, sign: str = "") -> str:
        """`0.500, 95 % interval 0.250 to 0.750`; `sign="+"` shows the signs."""
        mean, low, high = (f"{value:{sign}.3f}" for value in (self.mean, self.low, self.high))
        return f"{mean}, {100 * self.level:.0f} % interval {low} to {high}"


def pass_at_k(rollouts: int, successes: int, k: int) -> float:
    """An unbiased estimate of the probability that at least one of `k` rollouts succeeds, from n = `rollouts` rollouts
    with c = `successes` successes: 1 - C(n - c, k) / C(n, k) (2107.03374, equation 1). Raises ConfigError if k > n.

    1 of 4 rollouts succeeded. pass@1 is 1/4, and pass@2 is 1 - C(3, 2) / C(4, 2) = 1/2:

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2)
    (0.25, 0.5)
    """
    if not 1 <= k <= rollouts:
        raise ConfigError(f"pass@{k}: at least {k} scored rollouts of a scenario are needed, it has {rollouts}")
    return 1.0 - math.comb(rollouts - successes, k) / math.comb(rollouts, k)


def bootstrap_mean(
    values: Sequence[float], *, seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES
) -> Interval:
    """The mean of one value per scenario, with its bootstrap percentile interval (Efron and Tibshirani 1993, chapter
    13).

    Scenarios are resampled with replacement, not rollouts: rollouts of one scenario are not independent. With one
    value, or equal values, the interval has length 0 and says nothing about other scenarios. Raises ConfigError for no
    values."""
    if not values:
        raise ConfigError(
            "interval: no scenario has a value: all rollouts failed or have no reward. Look at their failures"
        )
    array = np.asarray(values, np.float64)
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // len(array))
    means: list[float] = []
    for begin in range(0, resamples, block):
        drawn = generator.integers(len(array), size=(min(block, resamples - begin), len(array)))
        means.extend(array[drawn].mean(axis=1).tolist())
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(math.fsum(values) / len(values), float(low), float(high), level)


def mean_reward(values: Sequence[float], *, seed: int = 0, level: float = LEVEL) -> Interval:
    """The mean reward of scenarios with its interval: `bootstrap_mean`'s, but where all values are 0 or all are 1 the
    exact one of a binomial (Clopper and Pearson 1934), since a bootstrap of equal values has length 0.

    >>> mean_reward([1.0] * 40).text()
    '1.000, 95 % interval 0.912 to 1.000'
    """
    if set(values) not in ({0.0}, {1.0}):
        return bootstrap_mean(values, seed=seed, level=level)
    bound = ((1 - level) / 2) ** (1 / len(values))
    low, high = (bound, 1.0) if values[0] else (0.0, 1 - bound)
    return Interval(float(values[0]), low, high, level)


def paired_difference(
    values: dict[str, float], baseline: dict[str, float], *, seed: int = 0, level: float = LEVEL
) -> Interval:
    """The mean of `values` - `baseline` over their common scenario ids, with its bootstrap interval. A scenario's
    difficulty cancels in the difference, so the interval is narrower than those of the two means. Raises ConfigError
    if no scenario is common."""
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        raise ConfigError("difference: the two evaluations share no scenario (by id): compare them on the same file")
    return bootstrap_mean([values[name] - baseline[name] for name in shared], seed=seed, level=level)
