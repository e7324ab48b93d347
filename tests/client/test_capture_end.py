"""What a rollout has for itself is given back when its capture ends."""

from __future__ import annotations

from collections.abc import Generator
from contextvars import copy_context

import pytest

from offbook import Trajectory, current_trajectory
from offbook.client.rollouts.capture import capturing, on_capture_end


def test_a_callback_runs_when_the_outermost_capture_of_its_trajectory_ends() -> None:
    ended: list[str] = []
    outer, other = Trajectory(), Trajectory()
    with capturing(outer):
        with capturing(outer):
            on_capture_end(lambda: ended.append("outer"))
        assert ended == []
        with capturing(other):
            on_capture_end(lambda: ended.append("other"))
        assert ended == ["other"]
    assert ended == ["other", "outer"]


def test_it_runs_when_the_rollout_fails_and_never_outside_of_one() -> None:
    ended: list[str] = []
    on_capture_end(lambda: ended.append("outside"))
    with pytest.raises(ValueError, match="failed"), capturing(Trajectory()):
        on_capture_end(lambda: ended.append("inside"))
        raise ValueError("failed")
    assert ended == ["inside"]


def test_blocks_inside_generators_may_end_in_any_order_and_leave_no_capture_behind() -> None:
    def opened(trajectory: Trajectory) -> Generator[None]:
        with capturing(trajectory):
            yield

    outer, first, second = Trajectory(), Trajectory(), Trajectory()
    with capturing(outer):
        blocks = [opened(first), opened(second)]
        for block in blocks:
            next(block)
        blocks[0].close()
        assert current_trajectory() is second
        blocks[1].close()
        assert current_trajectory() is outer
        elsewhere = opened(first)
        next(elsewhere)
        copy_context().run(elsewhere.close)
    assert current_trajectory() is None
