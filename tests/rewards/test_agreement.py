"""Kendall's tau-b and the share of pairs in order, against scipy and by hand."""

from __future__ import annotations

import pytest

from offbook.trainer.statistics import kendall_tau_b, pairs_in_order

SCIPY = [  # scipy 1.17.1, scipy.stats.kendalltau(first, second).statistic
    ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
    ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
    ([12, 2, 1, 12, 2], [1, 4, 7, 1, 0], -0.4714045207910316),
    ([1, 2, 2, 3], [0.1, 0.5, 0.4, 0.9], 0.912870929175277),
    ([1, 1, 2, 2, 3], [0.2, 0.2, 0.2, 0.7, 0.7], 0.7216878364870322),
    ([0.3, 0.1, 0.9, 0.5, 0.5, 0.7], [0.4, 0.2, 0.8, 0.6, 0.5, 0.1], 0.41403933560541256),
]


@pytest.mark.parametrize(("first", "second", "tau"), SCIPY)
def test_tau_b_is_scipys(first: list[float], second: list[float], tau: float) -> None:
    assert kendall_tau_b(first, second) == pytest.approx(tau, abs=1e-12)
    assert kendall_tau_b(second, first) == pytest.approx(tau, abs=1e-12)


def test_tau_b_does_not_exist_where_one_side_ties_all() -> None:
    assert (
        kendall_tau_b([1, 1], [1, 2]) is None
        and kendall_tau_b([1, 2], [0, 0]) is None
        and kendall_tau_b([1], [1]) is None
    )


def test_pairs_are_those_that_the_truth_orders_and_a_tie_is_half_a_pair() -> None:
    assert pairs_in_order([1, 2, 3], [0.1, 0.2, 0.3]) == (3, 3)
    assert pairs_in_order([1, 2, 2], [0.5, 0.5, 0.1]) == (0.5, 2)
    assert pairs_in_order([1, 1], [0.1, 0.9]) == (0, 0)
