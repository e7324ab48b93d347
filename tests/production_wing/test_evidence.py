"""The interval of two mean scores: what it promises, and that it shows what is there."""

from __future__ import annotations

import numpy as np
import pytest

from offbook_production.takeover import Evidence, ScoreSums, interval

NUMBER = 2_000


def drawn(rate: float, threads: int, seed: int) -> list[ScoreSums]:
    right = np.random.default_rng(seed).binomial(threads, rate, NUMBER)
    return [ScoreSums(threads, float(total), float(total)) for total in right]


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.92])
@pytest.mark.parametrize("threads", [20, 100])
def test_a_policy_that_is_worse_by_the_margin_passes_in_at_most_five_of_a_hundred_cases(
    rate: float, threads: int
) -> None:
    margin = 0.2
    pairs = zip(drawn(rate - margin, threads, 1), drawn(rate, threads, 2), strict=True)
    assert np.mean([interval(small, paid)[0] > -margin for small, paid in pairs]) <= 0.05


def test_an_equal_policy_mostly_passes_and_is_never_shown_to_be_worse() -> None:
    bounds = [interval(*pair) for pair in zip(drawn(0.92, 100, 3), drawn(0.92, 100, 4), strict=True)]
    assert np.mean([low > -0.1 for low, _ in bounds]) >= 0.6
    assert np.mean([high < -0.1 for _, high in bounds]) == 0.0


def test_a_policy_that_is_half_as_good_is_shown_to_be_worse() -> None:
    bounds = [interval(*pair) for pair in zip(drawn(0.46, 100, 5), drawn(0.92, 100, 6), strict=True)]
    assert np.mean([high < -0.1 for _, high in bounds]) >= 0.99


def test_the_bounds_are_those_computed_by_hand() -> None:
    half, most = ScoreSums(2, 1.0, 0.5), ScoreSums(2, 2.0, 2.0)  # two scores of 0.5, and two of 1
    # With a 0 and a 1 more: means 2/4 and 3/4, variances 1.5/4 - 1/4 and 3/4 - 9/16.
    room = 1.96 * ((0.125 + 0.1875) / 4) ** 0.5
    assert interval(half, most) == pytest.approx((-0.25 - room, -0.25 + room))


def test_scores_count_on_their_side_until_both_have_enough_and_then_by_as_many_at_a_time() -> None:
    evidence = Evidence(threads=2)
    for small in (True, True, True, False, False, True, False):
        evidence.add(1.0, small=small, watched=False)
    assert (evidence.small.count, evidence.paid.count, evidence.complete) == (3, 2, True)
    for score in (0.0, 1.0, 0.5):
        evidence.add(score, small=True, watched=True)
    evidence.add(1.0, small=False, watched=True)
    assert evidence.watched == ScoreSums(1, 0.5, 0.25)
