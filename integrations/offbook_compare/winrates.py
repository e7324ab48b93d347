"""Win rates from a judge that scored the candidates' rollouts of a scenario together. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbook.trainer.statistics import LEVEL, Interval, bootstrap_mean

LENGTH_RESAMPLES = 1_000
RIDGE = 0.01
"""L2 penalty of the logistic regression; keeps the log odds of a candidate that always wins finite."""
NEEDED_OVERLAP = 0.05
"""Smallest share of pairs in which either side must be the longer one, to separate length from quality."""
NEWTON_STEPS = 25

Array = NDArray[np.float64]


@dataclass(frozen=True)
class JudgedRollout:
    """One candidate's rollout in a judged group: its score, and the length of its messages in characters."""

    score: float
    length: int


JudgedGroup = Mapping[str, JudgedRollout]
"""The judged rollouts of one scenario, by candidate."""


@dataclass(frozen=True)
class WinRate:
    """How often a candidate beat the baseline; a tie counts half.

    `at_equal_length` is the estimated win rate if both wrote equally much; None if one of the two is nearly always longer, so
    that it cannot be estimated. `longer` is the share of pairs in which the candidate wrote more.
    """

    candidate: str
    against: str
    scenarios: int
    rate: Interval
    ties: float
    longer: float
    at_equal_length: Interval | None


def win_rate(
    groups: Sequence[tuple[str, JudgedGroup]], candidate: str, against: str, *, seed: int = 0
) -> WinRate | None:
    """The win rate over the groups (scenario, rollouts) that have both candidates; None if there is none.

    The interval is over scenarios, since the groups of one scenario are not independent.
    """
    pairs = [(name, group[candidate], group[against]) for name, group in groups if {candidate, against} <= group.keys()]
    if not pairs:
        return None
    wins: Array = np.array([_win(own.score, other.score) for _, own, other in pairs], np.float64)
    gaps: Array = np.array([float(own.length - other.length) for _, own, other in pairs], np.float64)
    names = [name for name, _, _ in pairs]
    members = np.array([list(dict.fromkeys(names)).index(name) for name in names])
    means = [float(wins[members == number].mean()) for number in range(len(set(names)))]
    return WinRate(
        candidate=candidate,
        against=against,
        scenarios=len(means),
        rate=bootstrap_mean(means, seed=seed),
        ties=np.count_nonzero(wins == 0.5) / len(wins),
        longer=float(np.mean((np.sign(gaps) + 1.0) / 2)),
        at_equal_length=length_controlled(wins, gaps, names, seed=seed),
    )


def _win(own: float, other: float) -> float:
    return 0.5 if own == other else float(own > other)


def length_controlled(wins: Array, gaps: Array, scenarios: Sequence[str], *, seed: int = 0) -> Interval | None:
    """The length-controlled win rate: logit P(win) = quality + slope * tanh(gap / std(gaps)), evaluated at gap 0.

    From arXiv:2404.04475, without its terms for the difficulty of an instruction. `gaps` are differences of length in
    characters. The interval is a bootstrap over scenarios. None if one side is longer in nearly all pairs.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(scenarios))}
    member = np.array([numbers[name] for name in scenarios])
    longer, shorter = float(np.mean(gaps > 0)), float(np.mean(gaps < 0))
    if not gaps.any():
        return bootstrap_mean([float(np.mean(wins[member == number])) for number in numbers.values()], seed=seed)
    if min(longer, shorter) < NEEDED_OVERLAP:
        return None
    lengths = np.tanh(gaps / float(np.std(gaps)))
    generator = np.random.default_rng(seed)
    drawn = generator.multinomial(len(numbers), np.full(len(numbers), 1 / len(numbers)), size=LENGTH_RESAMPLES)
    weights = np.concatenate([np.ones((1, len(wins))), drawn[:, member].astype(np.float64)])
    rates = _rates_at_equal_length(wins, lengths, weights)
    low, high = np.quantile(rates[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(rates[0]), float(low), float(high))


def _rates_at_equal_length(wins: Array, lengths: Array, weights: Array) -> Array:
    """One rate per row of weights (resample, pair), by Newton's method on the concave penalised log likelihood."""
    columns = np.stack([np.ones_like(lengths), lengths], axis=1)
    products = np.einsum("ni,nj->nij", columns, columns).reshape(len(lengths), 4)
    beta: Array = np.zeros((len(weights), 2))
    penalty: Array = RIDGE * np.eye(2)
    for _ in range(NEWTON_STEPS):
        chances: Array = 1 / (1 + np.exp(-np.clip(beta @ columns.T, -30, 30)))
        gradient: Array = (weights * (wins - chances)) @ columns - RIDGE * beta
        curvature: Array = ((weights * chances * (1 - chances)) @ products).reshape(-1, 2, 2) + penalty
        solved = np.linalg.solve(curvature, gradient[:, :, None])[:, :, 0].astype(np.float64)
        step: Array = np.clip(solved, -2, 2)
        beta = beta + step
        if float(np.abs(step).max()) < 1e-8:
            break
    return 1 / (1 + np.exp(-np.clip(beta[:, 0], -30, 30)))
