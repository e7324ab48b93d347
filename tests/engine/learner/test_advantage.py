from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.base.numbers import distinct
from offbook.engine.learner.targets.advantage import Advantages, GroupClass, call_advantages, group_advantages


def counts(result: Advantages) -> tuple[int, int, int]:
    """The groups with too few scored rollouts, of equal rewards, and trained."""
    dropped, equal = result.count(GroupClass.DROPPED_TOO_FEW), result.count(GroupClass.NO_SPREAD)
    return dropped, equal, result.count(GroupClass.TRAINED)


def test_the_advantage_is_the_reward_minus_the_groups_mean() -> None:
    result = group_advantages([[1.0, 0.0, 0.0, 1.0], [3.0, 0.0]], min_group_size=2, divide_by_std=False)
    assert result.values == ((0.5, -0.5, -0.5, 0.5), (1.5, -1.5))
    assert counts(result) == (0, 0, 2)


def test_dividing_uses_the_population_standard_deviation_plus_a_millionth() -> None:
    [values] = group_advantages([[2.0, 4.0, 6.0]], min_group_size=2, divide_by_std=True).values
    std = math.sqrt(8 / 3)
    assert values == pytest.approx((-2 / (std + 1e-6), 0.0, 2 / (std + 1e-6)), rel=1e-12)


def test_an_unscored_rollout_is_no_zero() -> None:
    [values] = group_advantages([[4.0, None, 2.0]], min_group_size=2, divide_by_std=False).values
    assert values == (1.0, None, -1.0)


def test_a_group_with_too_few_scored_rollouts_is_dropped_and_counted() -> None:
    result = group_advantages([[1.0, None, None], [1.0], []], min_group_size=2, divide_by_std=True)
    assert result.values == ((None, None, None), (None,), ())
    assert counts(result) == (3, 0, 0)


def test_the_least_group_size_counts_scored_rollouts_only() -> None:
    assert group_advantages([[1.0, 2.0, None]], min_group_size=3, divide_by_std=True).classes == (
        GroupClass.DROPPED_TOO_FEW,
    )


def test_a_group_without_spread_trains_nothing_even_where_the_mean_rounds() -> None:
    result = group_advantages([[0.1, 0.1, 0.1], [1.0, 1.0, None]], min_group_size=2, divide_by_std=True)
    assert result.values == ((None, None, None), (None, None, None))
    assert counts(result) == (0, 2, 0)


FLOAT32 = 0.10000000149011612
"""0.1 in float32."""


@pytest.mark.parametrize("equal", [[0.1, FLOAT32, 0.1], [0.1 + 0.2 - 0.3, 0.0], [-3e7, -3e7 - 1], [1e-9, 1e-9]])
def test_rewards_that_differ_by_rounding_are_equal(equal: list[float]) -> None:
    result = group_advantages([equal], min_group_size=2, divide_by_std=True)
    assert (result.values, counts(result)) == (((None,) * len(equal),), (0, 1, 0))


@pytest.mark.parametrize("different", [[1e-9, 0.0], [1000.0, 1000.01], [0.5, 0.500002]])
def test_rewards_that_differ_by_more_than_rounding_are_not(different: list[float]) -> None:
    half = (different[0] - different[1]) / 2
    [values] = group_advantages([different], min_group_size=2, divide_by_std=False).values
    assert values == pytest.approx((half, -half))


def test_a_reward_that_is_the_mean_up_to_rounding_has_no_advantage() -> None:
    [[low, middle, high]] = group_advantages([[0.0, FLOAT32, 0.2]], min_group_size=2, divide_by_std=True).values
    assert middle == 0.0 and low == pytest.approx(-1.2247, abs=1e-4) and high == pytest.approx(1.2247, abs=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_is_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match="group 1: rewards must be finite"):
        group_advantages([[0.0, 1.0], [0.0, bad]], min_group_size=2, divide_by_std=True)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.booleans())
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float], divide: bool) -> None:
    [values] = group_advantages([rewards], min_group_size=2, divide_by_std=divide).values
    if len(distinct(rewards)) == 1:
        assert set(values) == {None}
        return
    numbers = [value for value in values if value is not None]
    assert len(numbers) == len(rewards)
    assert math.fsum(numbers) == pytest.approx(0, abs=1e-6)
    assert numbers[rewards.index(max(rewards))] == max(numbers)


def test_a_calls_advantage_is_the_sum_of_the_normalised_parts_that_were_earned_after_it() -> None:
    result = call_advantages([[1.0, 3.0]], [[[1.0], [1.0, 2.0]]], min_group_size=2, divide_by_std=False)
    assert result.by_call is not None
    [(first, second)] = result.by_call
    assert first == pytest.approx((-1 / 3, 0.0)) and second == pytest.approx((1 / 3, 2 / 3, 0.0))
    assert result.values[0] == pytest.approx((-1 / 3, 1 / 3))


def test_the_rest_of_a_reward_is_earned_at_the_end() -> None:
    result = call_advantages([[1.0, None, 2.0]], [[[0.5], [], [0.0]]], min_group_size=2, divide_by_std=True)
    assert result.by_call is not None
    [(first, unscored, last)] = result.by_call  # parts: 0.5, 0.5 | 0, 2
    scale = math.sqrt((2 * 0.25**2 + 0.75**2 + 1.25**2) / 4) + 1e-6
    assert unscored is None
    assert first == pytest.approx((-0.5 / scale, -0.25 / scale))
    assert last == pytest.approx((0.5 / scale, 1.25 / scale))


def test_rounding_leaves_no_rest() -> None:
    result = call_advantages([[0.1 + 0.2, 0.3]], [[[0.1, 0.2], [0.3]]], min_group_size=2, divide_by_std=False)
    assert result.by_call is not None
    assert result.by_call[0][1] == pytest.approx((0.1, 0.0))  # the mean of 0.1, 0.2 and 0.3, and no fourth part


def test_call_rewards_that_differ_by_rounding_are_equal_and_leave_no_rest() -> None:
    result = call_advantages([[0.2, 2 * FLOAT32]], [[[0.1, 0.1], [FLOAT32, 0.1]]], min_group_size=2, divide_by_std=True)
    assert (result.values, counts(result)) == (((None, None),), (0, 1, 0))
    result = call_advantages([[0.1, 0.3]], [[[FLOAT32], [0.3]]], min_group_size=2, divide_by_std=False)
    assert result.by_call is not None
    assert result.by_call[0][0] == pytest.approx((-0.1, 0.0))  # no second part of 1e-9


def test_equal_parts_are_no_spread_and_few_scored_rollouts_are_counted() -> None:
    result = call_advantages(
        [[1.0, 2.0], [1.0, None], [0.0, 0.0]],
        [[[1.0], [1.0, 1.0]], [[], []], [[], []]],
        min_group_size=2,
        divide_by_std=True,
    )
    assert counts(result) == (1, 2, 0)
    assert set(result.of_calls) == {(None, None)}


def test_rollouts_of_equal_rewards_differ_by_when_they_earned_them() -> None:
    result = call_advantages([[1.0, 1.0]], [[[1.0, 0.0], [0.0, 1.0]]], min_group_size=2, divide_by_std=False)
    assert result.of_calls == (((0.0, -0.5, 0.0), (0.0, 0.5, 0.0)),)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.booleans())
def test_without_call_rewards_advantages_per_call_are_those_of_rollouts(rewards: list[float], divide: bool) -> None:
    plain = group_advantages([rewards], min_group_size=2, divide_by_std=divide)
    per_call = call_advantages([rewards], [[[] for _ in rewards]], min_group_size=2, divide_by_std=divide)
    assert (per_call.values, per_call.of_calls) == (plain.values, plain.of_calls)


def test_parts_beyond_the_limit_are_refused_like_rewards() -> None:
    with pytest.raises(ValueError, match="overflow in the advantages"):
        call_advantages([[1.0, 0.0]], [[[1e200, -1e200], []]], min_group_size=2, divide_by_std=False)
