"""The guards of a stage: each finds what it is for at its limit, and leaves alone what keeps it."""

from __future__ import annotations

import pytest

from offbook.base.takeovers import TakeoverPlan
from offbook.server.takeover.stage import COST_CALLS, Stage

SLOW, QUICK = 10.1, 9.9


def stage(**plan: float) -> Stage:
    return Stage(TakeoverPlan(**plan), share=0.25, most=500)  # pyright: ignore[reportArgumentType]


def test_slow_calls_are_found_when_they_are_more_than_their_limit() -> None:
    guarded = stage(slow_seconds=10, max_slow=0.05)
    for number in range(200):
        guarded.add_call(SLOW if number % 4 == 0 else QUICK, None)
        if guarded.finding():
            break
    found = guarded.finding()
    assert found is not None and found.passed is False
    assert found.reason == "guard: calls slower than 10 s: more than 5%"
    assert 2 <= guarded.numbers().slow <= 25


def test_a_slow_call_in_fifty_is_left_alone() -> None:
    guarded = stage(slow_seconds=10, max_slow=0.05)
    for number in range(1_000):
        guarded.add_call(SLOW if number % 50 == 0 else QUICK, None)
        assert guarded.finding() is None
    assert guarded.numbers().slow == 20


def test_a_call_that_failed_is_not_slow_too() -> None:
    guarded = stage()
    guarded.add_call(SLOW, "late")
    assert (guarded.numbers().slow, guarded.numbers().failed) == (0, {"late": 1})


@pytest.mark.parametrize(("small", "found"), [(0.0011, True), (0.001, False), (0.0001, False)])
def test_a_mean_cost_above_the_paid_models_is_found_once_both_have_enough_calls(small: float, found: bool) -> None:
    guarded = stage()
    for _ in range(COST_CALLS - 1):
        guarded.add_small_cost(small)
        guarded.add_paid_cost(0.001)
    guarded.add_paid_cost(None)  # a call of unknown cost counts for nothing
    guarded.add_small_cost(small)
    assert guarded.finding() is None
    guarded.add_paid_cost(0.001)
    finding = guarded.finding()
    assert (finding is not None) is found
    if finding is not None:
        assert finding == (False, "guard: 0.001100 USD per call, and the paid model costs 0.001000")


def test_failed_results_of_tools_are_found_when_they_are_more_than_their_limit() -> None:
    guarded = stage(max_tool_errors=0.1)
    for _ in range(200):
        for number in range(3):
            guarded.add_result(failed=number == 0)
        if guarded.finding():
            break
    assert guarded.finding() == (False, "guard: failed results of the app's tools: more than 10%")
    assert guarded.numbers().results <= 60
    fine = stage(max_tool_errors=0.1)
    for number in range(1_000):
        fine.add_result(failed=number % 20 == 0)
        assert fine.finding() is None


def test_a_drift_is_named_by_what_differs() -> None:
    guarded = stage(max_unknown=0.2)
    for number in range(30):
        guarded.add_unlike("longer" if number % 3 else "new tools")
        if guarded.finding():
            break
    finding = guarded.finding()
    assert finding is not None
    assert finding.reason == "drift: calls unlike those that were seen (longer, new tools): more than 20%"
