"""Sequential tests of means by betting: confidence sequences, which hold at all times at once, so that looking often costs nothing.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", arXiv 2010.09686: the capital
process (section 4.1) and the confidence sequence by Ville's inequality (theorem 1). A bet is the growth-optimal one for a
mean that is `gap` away, gap / variance (approximate Kelly, as their "aGRAPA", appendix B.3, with a gap that is chosen where
theirs is estimated). The test of two means multiplies the capitals of two streams: each is a test supermartingale of its own
mean, and so is the product, whatever the order in which outcomes arrive.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CELLS = 500
"""Cells of [0, 1]. A bound is exact to one cell, a bound of a difference to two, and never too narrow."""
TRUNCATION = 0.75
"""c in the paper: a bet risks at most this share of the capital."""
REFERENCE = 4
"""Outcomes of the reference that are used for each that is tested."""
USUAL, LATEST = 4, 24
"""Units of outcomes: see `threads_needed`."""


class MeanBets:
    """The evidence about the mean of a stream of outcomes in [0, 1], whose mean given its past is constant.

    `below[..., i]`: log capital of bets that the mean lies below cell i, which grows while it does; `above`: the same for
    above it. `gap`: the distance from the mean that is to be shown soonest; larger and smaller ones are shown too. `batch`: shape
    of independent streams that go in step, as in simulations.
    """

    def __init__(self, gap: float, batch: tuple[int, ...] = ()) -> None:
        edges = np.linspace(0.0, 1.0, CELLS + 1)
        self._low, self._high = edges[:-1], edges[1:]
        self._most_above = TRUNCATION / self._high
        self._most_below = TRUNCATION / (1.0 - self._low)
        self._gap = gap
        self.count = 0
        self.total = np.zeros((*batch, 1))
        self._squares = np.full((*batch, 1), 0.25)
        self.above = np.zeros((*batch, CELLS))
        self.below = np.zeros((*batch, CELLS))

    @property
    def mean(self) -> Floats:
        """The mean of the outcomes, of the shape of the batch; 0 without outcomes."""
        return self.total[..., 0] / max(1, self.count)

    def add(self, outcome: float | Floats) -> None:
        """Bet on the next outcome, an array of the batch's shape or a number. Raises ValueError outside of [0, 1]."""
        value = np.asarray(outcome, dtype=np.float64)[..., None]
        if not np.all((value >= 0.0) & (value <= 1.0)):
            raise ValueError(f"an outcome is a number in [0, 1], not {outcome!r}")
        mean = (0.5 + self.total) / (1 + self.count)
        variance = self._squares / (1 + self.count)
        error = np.sqrt(variance / (1 + self.count))
        bet = np.minimum(self._bet(mean - self._high, variance, error), self._most_above)
        self.above += np.log1p(bet * (value - self._high))
        bet = np.minimum(self._bet(self._low - mean, variance, error), self._most_below)
        self.below += np.log1p(bet * (self._low - value))
        self.count += 1
        self.total = self.total + value
        self._squares = self._squares + (value - (0.5 + self.total) / (1 + self.count)) ** 2

    def _bet(self, seen: Floats, variance: Floats, error: Floats) -> Floats:
        """The bet for each cell whose edge is `seen` away from the mean so far, which has this standard `error`."""
        gap = np.maximum(np.minimum(seen + error, self._gap), seen - error)
        gap = np.maximum(gap, 0.0)
        return gap / (variance + gap * gap)

    def bounds(self, alpha: float) -> tuple[float, float]:
        """The interval that has the mean. Each side is wrong, at any time, with probability `alpha` at most. No batch."""
        return self._edge(self.above, alpha), 1.0 - self._edge(self.below[::-1], alpha)

    def above_level(self, level: float, alpha: float) -> NDArray[np.bool_]:
        """Whether "the mean is at most `level`" is rejected, of the shape of the batch: if true, with probability `alpha` at most."""
        return self.above[..., _cell(level)] >= np.log(1.0 / alpha)

    def below_level(self, level: float, alpha: float) -> NDArray[np.bool_]:
        """Whether "the mean is at least `level`" is rejected, as `above_level`."""
        return self.below[..., CELLS - 1 - _cell(1.0 - level)] >= np.log(1.0 / alpha)

    def _edge(self, capital: Floats, alpha: float) -> float:
        """The upper edge of the cells from 0 on that are all rejected."""
        rejected = capital >= np.log(1.0 / alpha)
        return float(self._high[-1] if rejected.all() else self._low[np.argmin(rejected)])


class SequentialComparison:
    """A test whether the mean outcome of `tested` is below that of `reference` by `margin` or more.

    `share`: of the threads that `tested` gets. `alpha`: largest probability, over all times, of `not_worse` if the mean is
    lower by the margin or more, and of `worse` if it is not. Of the reference no more than REFERENCE outcomes are used for
    each that is tested: more would tell little.
    """

    def __init__(self, margin: float, share: float, alpha: float, batch: tuple[int, ...] = ()) -> None:
        tested = max(share, 1 / (1 + REFERENCE))
        self.margin = margin
        self.alpha = alpha
        self.tested = MeanBets(margin * (1 - tested), batch)
        self.reference = MeanBets(margin * tested, batch)

    def add(self, outcome: float | Floats, *, tested: bool) -> None:
        """Take in the outcome of a thread, in order of arrival. Raises ValueError outside of [0, 1]."""
        if tested:
            self.tested.add(outcome)
        elif self.reference.count < REFERENCE * (1 + self.tested.count):
            self.reference.add(outcome)

    def not_worse(self) -> NDArray[np.bool_]:
        """Whether it is shown that the mean is lower by less than the margin, of the shape of the batch."""
        return _rejected(self.tested, self.reference, -self.margin, self.alpha)

    def worse(self) -> NDArray[np.bool_]:
        """Whether it is shown that the mean is lower by more than the margin."""
        return _rejected(self.reference, self.tested, self.margin, self.alpha)

    def bounds(self) -> tuple[float, float]:
        """The interval of the difference of the means, tested - reference, exact to 2 / CELLS. No batch."""
        lower = _largest_rejected(self.tested, self.reference, self.alpha)
        return lower, -_largest_rejected(self.reference, self.tested, self.alpha)


def _cell(level: float) -> int:
    """The first cell whose upper edge is not below a level."""
    return min(CELLS - 1, max(0, int(np.ceil(level * CELLS - 1e-9)) - 1))


def threads_needed(margin: float, share: float, variance: float) -> tuple[int, int]:
    """Outcomes of the tested side until a policy that is equal passes: usually, and at the latest in most cases.

    Bets of growth gap**2 / (2 * variance) reach 1 / 0.05 after 3 units of 2 * variance / margin**2, divided among both sides.
    The factors are those that benchmarks/takeover.py measures.
    """
    tested = max(share, 1 / (1 + REFERENCE))
    unit = 2 * variance / (margin**2 * (1 - tested))
    return round(USUAL * unit), round(LATEST * unit)


def _rejected(tested: MeanBets, reference: MeanBets, difference: float, alpha: float) -> NDArray[np.bool_]:
    """Whether the hypothesis "mean of `tested` - mean of `reference` <= `difference`" is rejected.

    If it is true, it is ever rejected with probability `alpha` at most: every pair of cells with such a difference must have
    lost, together, all but `alpha` of its bets.
    """
    last = np.arange(CELLS) + 1 + int(np.floor(difference * CELLS + 1e-9))  # tested cell for each of the reference's
    weakest = np.minimum.accumulate(tested.above, axis=-1)[..., np.clip(last, 0, CELLS - 1)]
    evidence = np.where(last < 0, np.inf, weakest + reference.below)
    return evidence.min(axis=-1) >= np.log(1.0 / alpha)


def _largest_rejected(tested: MeanBets, reference: MeanBets, alpha: float) -> float:
    """The largest difference in steps of a cell that is rejected with all smaller ones; -1 if none is."""
    low, high = -CELLS, CELLS
    while low < high:
        middle = (low + high + 1) // 2
        if _rejected(tested, reference, middle / CELLS, alpha):
            low = middle
        else:
            high = middle - 1
    return low / CELLS
