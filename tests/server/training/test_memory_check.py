"""What a step took, against the plan: in its metrics, and once in the log."""

from __future__ import annotations

import logging

import pytest

from offbook.base.server_options import MemoryLayout
from offbook.memory_plan.parts import Card, Workload, find_shape
from offbook.memory_plan.plan import MemoryPlan, make_plan
from offbook.server.training.runner import MemoryCheck

GIB = 2**30


def plan_with(layout: MemoryLayout, taken: int = 0) -> MemoryPlan:
    base = "Qwen/Qwen2.5-0.5B-Instruct"
    return make_plan(base, find_shape(base), Card("L4", 24 * GIB, taken), Workload(), layout)


@pytest.mark.parametrize("layout", ["free_cache", "offload"])
def test_a_step_is_compared_with_the_plans_peak_of_the_learner_and_of_the_gpu(
    layout: MemoryLayout, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_with(layout)
    learner, gpu = plan.learner_peak / GIB, plan.step / GIB
    check = MemoryCheck(plan)
    measured = {"memory/learner_peak": learner - 0.5, "memory/learner_held": 1.0, "memory/gpu_peak": gpu - 0.25}
    with caplog.at_level(logging.INFO):
        assert check.over_plan(measured) == pytest.approx(
            {"memory/learner_over_plan": -0.5, "memory/gpu_over_plan": -0.25}
        )
        check.over_plan(measured)
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert f"the learner's tensors {learner - 0.5:.2f}, planned {learner:.2f} (-0.50)" in record.message
    assert f"the GPU {gpu - 0.25:.2f}, planned {gpu:.2f} (-0.25)" in record.message


def test_more_than_was_planned_is_a_warning_that_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_with("offload")
    measured = {"memory/learner_peak": plan.learner_peak / GIB - 1, "memory/gpu_peak": plan.step / GIB + 2}
    assert MemoryCheck(plan).over_plan(measured)["memory/gpu_over_plan"] == pytest.approx(2)
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.message.endswith("plan for less with a smaller --card")


def test_side_by_side_vllms_cache_fills_the_gpu_and_other_programs_are_counted_as_the_driver_does() -> None:
    measured = {"memory/learner_peak": 1.0, "memory/gpu_peak": 23.0}
    assert MemoryCheck(plan_with("side_by_side")).over_plan(measured)["memory/gpu_over_plan"] == pytest.approx(-1)
    beside = plan_with("offload", taken=2 * GIB)
    over = MemoryCheck(beside).over_plan(measured)["memory/gpu_over_plan"]
    assert over == pytest.approx(23 - beside.step / GIB - 2)


def test_without_a_plan_or_a_measurement_nothing_is_compared() -> None:
    assert MemoryCheck(None).over_plan({"memory/learner_peak": 1.0, "memory/gpu_peak": 2.0}) == {}
    assert MemoryCheck(plan_with("offload")).over_plan({"kl/base": 0.1}) == {}
