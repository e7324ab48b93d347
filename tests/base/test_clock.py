"""Jumps of the wall clock in mid-run: no duration, order, session, throttle or retention changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path
from uuid import uuid4

import pytest

from offbook.base import clock
from offbook.base.types import Trajectory
from offbook.server.views.numbers import ago, moment
from offbook.testing import Action, scripted_server
from offbook_langgraph.calls.recorded_calls import StartedCall
from offbook_langgraph.calls.run_tree import ToolWatch

DAY = 86_400.0
Jump = Callable[[float], None]
QUICK = 60.0
"""Far less than any jump, and more than a test takes."""


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Generator[Jump]:
    """Set the wall clock forward by some seconds, or back."""
    real, offset = time.time, 0.0

    def by(seconds: float) -> None:
        nonlocal offset
        clock.now()
        offset += seconds

    monkeypatch.setattr(time, "time", lambda: real() + offset)
    monkeypatch.setattr(clock, "_process", clock.Clock())
    yield by


def test_times_never_go_back_and_durations_leave_jumps_out() -> None:
    wall, running = [1_000 * DAY], [0.0]
    watch = clock.Clock(lambda: wall[0], lambda: running[0])
    began = [watch.now()]
    for seconds in (-DAY, 2 * DAY, DAY, -0.5, -30 * DAY, 5 * DAY, -3.0, 60 * DAY):
        wall[0] += seconds + 10
        running[0] += 10
        began.append(watch.now())
    assert began == sorted(set(began))
    for index, start in enumerate(began):
        assert watch.since(start) == pytest.approx(10 * (len(began) - 1 - index), abs=0.6)


def test_a_clock_goes_on_from_a_moment_and_durations_leave_it_out() -> None:
    wall, running = [1_000 * DAY], [0.0]
    watch = clock.Clock(lambda: wall[0], lambda: running[0])
    began = watch.now()
    assert (watch.advance(1_001 * DAY), watch.now()) == (DAY, 1_001 * DAY)
    assert watch.advance(1_000 * DAY) == 0
    wall[0] += 10
    running[0] += 10
    assert (watch.now(), watch.since(began)) == (1_001 * DAY + 10, 10)
    wall[0] += DAY  # the clock is right again
    assert (watch.now(), watch.since(began)) == (1_001 * DAY + 10, 10)


def test_a_clock_that_is_right_again_is_followed_again() -> None:
    wall, running = [1_000 * DAY], [0.0]
    watch = clock.Clock(lambda: wall[0], lambda: running[0])
    for seconds in (-DAY, DAY):
        wall[0] += seconds + 10
        running[0] += 10
        watch.now()
    assert watch.now() == wall[0]


@pytest.mark.parametrize("seconds", [-DAY, DAY])
def test_durations_survive_a_jump(jump: Jump, seconds: float) -> None:
    trajectory, call, watch = Trajectory(), StartedCall((), None), ToolWatch()
    run, begun_at = uuid4(), clock.now()
    watch.start(run, "find", "1")
    jump(seconds)
    watch.end(run, "it")
    watch.write(trajectory, ())
    [tool] = trajectory.tool_runs
    ended = call.ended(trajectory, (), "complete", call_id="c")  # pyright: ignore[reportArgumentType]
    for begun, done in [
        (trajectory.started_at, trajectory.finish().ended_at or 0.0),
        (ended.started_at, ended.ended_at),
        (tool.started_at, tool.ended_at),
        (begun_at, begun_at + clock.since(begun_at)),  # as the loop of the MCP adapter takes it
    ]:
        assert 0 <= done - begun < QUICK
    assert 0 <= float(trajectory.metrics["duration"]) < QUICK
    assert Trajectory().started_at >= trajectory.started_at


@pytest.mark.parametrize("seconds", [-DAY, DAY])
def test_a_servers_records_keep_their_order_and_durations(jump: Jump, seconds: float) -> None:
    jumps = [seconds, 0.0, -seconds, seconds]

    def policy(body: object) -> Action:
        jump(jumps.pop())
        return Action("yes")

    with scripted_server(policy) as server:
        trajectory = f"traj-{uuid4().hex}"
        for index in range(4):
            server.http.post(
                f"/t/{trajectory}/v1/chat/completions",
                json={"model": "default", "messages": [{"role": "user", "content": str(index)}]},
            ).raise_for_status()
        calls = server.calls(trajectory)
    assert [call.messages[0]["content"] for call in calls] == ["0", "1", "2", "3"]
    assert all(0 <= call.ended_at - call.started_at < QUICK for call in calls)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("seconds", [-DAY, DAY])
def test_records_keep_their_order_when_the_clock_was_set_while_the_server_was_down(
    jump: Jump, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trajectory = f"traj-{uuid4().hex}"
    for index in range(4):
        with scripted_server(lambda _: Action("yes"), tmp_path) as server:
            server.http.post(
                f"/t/{trajectory}/v1/chat/completions",
                json={"model": "default", "messages": [{"role": "user", "content": str(index)}]},
            ).raise_for_status()
            calls = server.calls(trajectory)
        jump((seconds, 0.0, -seconds, 0.0)[index])
        monkeypatch.setattr(clock, "_process", clock.Clock())
    assert [call.messages[0]["content"] for call in calls] == ["0", "1", "2", "3"]
    assert all(0 <= call.ended_at - call.started_at < QUICK for call in calls)
    assert "behind the newest record" in caplog.text


@pytest.mark.parametrize("seconds", [-DAY, DAY])
def test_a_jump_makes_no_call_older(jump: Jump, seconds: float) -> None:
    running = [0.0]
    age = clock.RunningAge(60.0, lambda: running[0])
    ended = clock.now()
    jump(seconds)
    running[0] = 59.0
    assert age.older() is None
    running[0] = 61.0
    assert (age.older() or DAY) <= ended
    jump(-seconds)
    running[0] = 200.0
    assert (age.older() or 0.0) > ended


def test_a_moment_that_is_still_to_come_is_shown_as_it_is() -> None:
    assert ago(DAY, now=0.0) == moment(DAY)
    assert ago(5.0, now=0.0) == "just now"
