"""The sequential tests: what they promise at all times, and that they find what is there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offbook.server.takeover.evidence import CELLS, REFERENCE, MeanBets, SequentialComparison, threads_needed

NUMBER = 100
MARGIN = 0.2


def ever(good: float, upstream: float, seed: int) -> tuple[float, float]:
    """The shares of 100 comparisons that ever found the policy not worse, and worse."""
    comparison = SequentialComparison(MARGIN, 0.25, 0.05, (NUMBER,))
    draw = np.random.default_rng(seed)
    passed, left = np.zeros(NUMBER, dtype=bool), np.zeros(NUMBER, dtype=bool)
    for _ in range(threads_needed(MARGIN, 0.25, 0.92 * 0.08)[1]):
        comparison.add((draw.random(NUMBER) < good).astype(float), tested=True)
        for _ in range(3):
            comparison.add((draw.random(NUMBER) < upstream).astype(float), tested=False)
        passed |= comparison.not_worse()
        left |= comparison.worse()
    return float(passed.mean()), float(left.mean())


def test_a_policy_that_is_worse_by_the_margin_is_passed_at_any_time_in_at_most_alpha_of_the_cases() -> None:
    passed, _ = ever(0.92 - MARGIN, 0.92, seed=1)
    assert passed <= 0.05


def test_an_equal_policy_is_passed_and_is_not_found_worse() -> None:
    passed, left = ever(0.92, 0.92, seed=2)
    assert passed >= 0.9 and left == 0.0


def test_a_policy_that_is_half_as_good_is_found() -> None:
    passed, left = ever(0.46, 0.92, seed=3)
    assert passed == 0.0 and left >= 0.8


def test_the_first_bet_is_the_one_computed_by_hand() -> None:
    bets = MeanBets(0.05)
    bets.add(1.0)
    # Before the first outcome the mean is 1/2 and the variance 1/4, so its error is 1/2: the gap is the one that was chosen.
    bet = 0.05 / (0.25 + 0.05**2)
    upper = (CELLS // 2 - 1 + 1) / CELLS  # of the last cell below 1/2
    assert bets.above[CELLS // 2 - 1] == pytest.approx(math.log1p(bet * (1.0 - upper)))
    assert bets.above[-1] == 0.0  # no bet that the mean is above 1


def test_bounds_have_the_mean_and_the_difference_and_shrink() -> None:
    draw = np.random.default_rng(4)
    comparison = SequentialComparison(0.1, 0.5, 0.05)
    assert comparison.bounds() == (-1.0, 1.0)
    for _ in range(400):
        comparison.add(float(draw.random() < 0.8), tested=True)
        comparison.add(float(draw.random() < 0.6), tested=False)
    lower, upper = comparison.bounds()
    assert 0.0 < lower < 0.2 < upper < 0.4
    least, most = comparison.tested.bounds(0.05)
    assert 0.7 < least < 0.8 < most < 0.9


def test_levels_are_shown_from_both_sides() -> None:
    draw = np.random.default_rng(5)
    bets = MeanBets(0.1)
    for _ in range(300):
        bets.add(float(draw.random() < 0.9))
    assert bets.above_level(0.8, 0.05) and not bets.above_level(0.95, 0.05)
    assert bets.below_level(0.98, 0.05) and not bets.below_level(0.85, 0.05)


def test_more_of_the_reference_than_is_of_use_is_not_counted() -> None:
    comparison = SequentialComparison(0.1, 0.01, 0.05)
    for _ in range(50):
        comparison.add(1.0, tested=False)
    assert comparison.reference.count == REFERENCE


@pytest.mark.parametrize("outcome", [1.01, -0.01, math.nan])
def test_an_outcome_outside_of_0_to_1_is_an_error(outcome: float) -> None:
    with pytest.raises(ValueError, match=r"a number in \[0, 1\]"):
        MeanBets(0.1).add(outcome)
