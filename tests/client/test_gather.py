"""Many rollouts at once: what is kept, what fails, and how it is said."""

from __future__ import annotations

import asyncio
import gc
import json
import re

import numpy as np
import pytest
import torch

import offbook
from offbook.base.errors import ConfigError, LeakError, RolloutError
from offbook.base.types import RolloutException, as_rollout_exception
from offbook.client.rollouts.failures import FailureKind, failure_kinds, summary


async def scored(reward: float) -> offbook.Trajectory:
    return offbook.Trajectory(reward=reward)


async def broken(message: str = "no luck") -> offbook.Trajectory:
    raise ValueError(message)


async def test_groups_of_coroutines_are_run_and_keep_order_and_metadata() -> None:
    groups = await offbook.gather_trajectory_groups(
        offbook.TrajectoryGroup((scored(10 * g + i) for i in range(3)), metadata={"scenario": g}) for g in range(2)
    )
    assert [[t.reward for t in group] for group in groups] == [[0, 1, 2], [10, 11, 12]]
    assert [group.metadata for group in groups] == [{"scenario": 0}, {"scenario": 1}]
    assert all(t.ended_at is not None and t.metrics["duration"] >= 0 for group in groups for t in group)


async def test_the_siblings_of_a_failed_rollout_go_on_and_the_exception_is_kept_with_its_traceback() -> None:
    [group] = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup([scored(1), broken(), scored(2)])], max_exceptions=1
    )
    assert [t.reward for t in group] == [1, 2]
    [error] = group.exceptions
    assert (error.type, error.message) == ("ValueError", "no luck")
    assert "in broken" in error.traceback


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metrics": {"found_at": None}}, "metrics['found_at'] must be a number, got None"),
        ({"reward": "good"}, "the trajectory: reward must be a number or None (unscored), got 'good'"),
        ({"reward": float("nan")}, "reward must be finite or None (unscored), got nan"),
        ({"metrics": {"loss": float("inf")}}, "metrics['loss'] must be finite, got inf"),
        ({"reward": 1e308}, "reward must be within +-1e+100, got 1e+308: scale it"),
        ({"metrics": {"loss": -2e100}}, "metrics['loss'] must be within +-1e+100, got -2e+100: scale it"),
    ],
)
async def test_what_is_no_finite_number_fails_its_rollout_by_name_and_no_other(
    fields: dict[str, object], message: str
) -> None:
    async def odd() -> offbook.Trajectory:
        trajectory = await scored(1)
        for name, value in fields.items():
            setattr(trajectory, name, value)
        return trajectory

    [group] = await offbook.gather_trajectory_groups([offbook.TrajectoryGroup([scored(1), odd()])], max_exceptions=1)
    assert [t.reward for t in group] == [1]
    assert message in group.exceptions[0].message


async def test_scalars_of_numpy_and_torch_become_plain_numbers() -> None:
    async def scientific() -> offbook.Trajectory:
        trajectory = offbook.Trajectory(metrics={"turns": np.int64(3), "right": True})  # type: ignore[dict-item]
        trajectory.reward = torch.tensor(0.5)  # type: ignore[assignment]
        return trajectory

    [trajectory] = await offbook.gather_trajectories([scientific()])
    assert (trajectory.reward, type(trajectory.reward)) == (0.5, float)
    kinds = {name: type(value) for name, value in trajectory.metrics.items()}
    assert (kinds["turns"] in (int, float), kinds["right"]) == (True, bool)
    json.dumps(trajectory.metrics)


@pytest.mark.parametrize("limit", [0, 0.9, 100])
async def test_a_call_past_the_capture_ends_everything_at_once_whatever_failures_are_allowed(limit: float) -> None:
    ended: list[str] = []
    tries: list[str] = []

    async def leaking() -> offbook.Trajectory:
        tries.append("leaking")
        raise LeakError("POST https://api.example.com/v1/chat/completions left at app.py:3")

    async def long() -> offbook.Trajectory:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("long")
        raise AssertionError

    with pytest.raises(LeakError, match="left at app"):
        await offbook.gather_trajectory_groups(
            [offbook.TrajectoryGroup([long, leaking]), offbook.TrajectoryGroup([long])], max_exceptions=limit, retries=3
        )
    assert (ended, tries) == (["long", "long"], ["leaking"])


async def test_a_capture_fault_is_found_in_the_group_of_a_task_group_and_in_a_group_that_cannot_be_made() -> None:
    async def leaking() -> offbook.Trajectory:
        raise LeakError("past the capture")

    async def in_a_task() -> offbook.Trajectory:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leaking())
        raise AssertionError

    async def no_group() -> offbook.TrajectoryGroup:
        await leaking()
        raise AssertionError

    for source in (offbook.TrajectoryGroup([in_a_task()]), no_group()):
        with pytest.raises(LeakError, match="past the capture"):
            await offbook.gather_trajectory_groups([source], max_exceptions=10)


async def test_a_capture_fault_that_a_trajectory_carries_is_one_failed_rollout() -> None:
    async def noted() -> offbook.Trajectory:
        return offbook.Trajectory(exception=RolloutException(type="LeakError", message="past", traceback=""))

    [group] = await offbook.gather_trajectory_groups([offbook.TrajectoryGroup([noted(), scored(1)])])
    assert [trajectory.reward for trajectory in group] == [None, 1]


async def test_too_many_exceptions_are_an_error_that_lists_the_causes_with_counts() -> None:
    rollouts = [broken("a"), broken("a"), broken("b"), scored(1)]
    with pytest.raises(RolloutError) as caught:
        await offbook.gather_trajectory_groups([offbook.TrajectoryGroup(rollouts)], max_exceptions=2)
    assert "3 of 4 rollouts failed, more than max_exceptions=2" in str(caught.value)
    assert "2 x ValueError: a" in str(caught.value) and "1 x ValueError: b" in str(caught.value)


async def test_beyond_the_limit_the_other_rollouts_are_ended_and_awaited() -> None:
    ended: list[str] = []

    async def long() -> offbook.Trajectory:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("long")
        raise AssertionError

    with pytest.raises(RolloutError, match="no luck"):
        await offbook.gather_trajectory_groups([offbook.TrajectoryGroup([long(), broken()])])
    assert ended == ["long"]


@pytest.mark.parametrize(("limit", "fails"), [(0.5, False), (0.4, True)])
async def test_max_exceptions_below_one_is_a_fraction_of_all_rollouts(limit: float, fails: bool) -> None:
    group = offbook.TrajectoryGroup([broken(), scored(1), broken(), scored(2)])
    if not fails:
        assert len((await offbook.gather_trajectory_groups([group], max_exceptions=limit))[0]) == 2
        return
    with pytest.raises(RolloutError, match="2 of 4"):
        await offbook.gather_trajectory_groups([group], max_exceptions=limit)


async def test_a_rollout_that_takes_too_long_is_a_failure_that_names_the_timeout() -> None:
    async def endless() -> offbook.Trajectory:
        await asyncio.Event().wait()
        raise AssertionError

    [group] = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup([endless(), scored(1)])], timeout=0.05, max_exceptions=1
    )
    assert [error.type for error in group.exceptions] == ["TimeoutError"]
    assert "timeout=0.05 s" in group.exceptions[0].message


async def test_a_timeout_inside_a_rollout_is_that_rollouts_own() -> None:
    async def impatient() -> offbook.Trajectory:
        raise TimeoutError("the tool was slow")

    [group] = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup([impatient()])], timeout=60, max_exceptions=1
    )
    assert group.exceptions[0].message == "the tool was slow"


async def test_cancelling_the_gathering_cancels_the_rollouts_and_is_no_exception_of_theirs() -> None:
    started, cancelled = asyncio.Event(), []

    async def waiting() -> offbook.Trajectory:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        raise AssertionError

    group = offbook.TrajectoryGroup([waiting()])
    task = asyncio.create_task(offbook.gather_trajectory_groups([group], max_exceptions=1))
    await asyncio.wait_for(started.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [True] and group.exceptions == []


async def test_a_rollout_that_cancels_itself_is_a_failed_rollout() -> None:
    async def suicidal() -> offbook.Trajectory:
        raise asyncio.CancelledError("a library's scope leaked")

    [group] = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup([suicidal(), scored(1)])], max_exceptions=1
    )
    assert len(group) == 1 and "cancelled from inside" in group.exceptions[0].message


async def test_at_most_so_many_rollouts_run_at_once() -> None:
    running = most = 0

    async def counted() -> offbook.Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return offbook.Trajectory(reward=1)

    await offbook.gather_trajectory_groups([offbook.TrajectoryGroup(counted() for _ in range(9))] * 1, concurrency=2)
    assert most == 2


async def test_a_callable_is_run_again_and_only_its_last_failure_counts() -> None:
    tries: list[int] = []

    async def third_time() -> offbook.Trajectory:
        tries.append(len(tries))
        if len(tries) < 3:
            raise ValueError("not yet")
        return offbook.Trajectory(reward=1)

    [group] = await offbook.gather_trajectory_groups([offbook.TrajectoryGroup([third_time])], retries=2)
    assert len(group) == 1 and len(tries) == 3 and group.exceptions == []


async def test_retries_of_coroutines_are_refused_before_anything_runs() -> None:
    rollout = scored(1)
    with pytest.raises(ConfigError, match="pass callables"):
        await offbook.gather_trajectory_groups([offbook.TrajectoryGroup([rollout])], retries=1)
    rollout.close()


async def test_rollouts_that_were_never_begun_leave_no_warning_behind() -> None:
    with pytest.raises(RolloutError, match="1 of 5 rollouts failed"):
        await offbook.gather_trajectory_groups(
            [offbook.TrajectoryGroup([broken(), *(scored(1) for _ in range(4))])], concurrency=1
        )
    gc.collect()


async def test_a_group_that_cannot_be_made_counts_as_a_failure_and_what_is_no_group_is_refused() -> None:
    async def no_group() -> offbook.TrajectoryGroup:
        raise ValueError("no scenario")

    [kept] = await offbook.gather_trajectory_groups(
        [no_group(), offbook.TrajectoryGroup([scored(1)])], max_exceptions=1
    )
    assert len(kept) == 1
    with pytest.raises(ConfigError, match=r"groups\[0\] is a Trajectory"):
        await offbook.gather_trajectory_groups([offbook.Trajectory()])  # type: ignore[list-item]


async def test_a_rollout_that_returns_no_trajectory_says_what_it_returned() -> None:
    async def forgetful() -> offbook.Trajectory:
        return None  # type: ignore[return-value]

    with pytest.raises(RolloutError, match="returned None; it must return a Trajectory"):
        await offbook.gather_trajectories([forgetful()])


async def test_after_each_may_replace_split_or_drop_a_group_and_its_failure_drops_the_group_counted() -> None:
    async def after(group: offbook.TrajectoryGroup) -> offbook.TrajectoryGroup | list[offbook.TrajectoryGroup] | None:
        kind = group.metadata["kind"]
        if kind == "bad":
            raise ValueError("the judge failed")
        return {"same": group, "none": None, "two": [group, group]}[kind]

    def groups() -> list[offbook.TrajectoryGroup]:
        return [
            offbook.TrajectoryGroup([scored(1)], metadata={"kind": kind}) for kind in ("same", "none", "two", "bad")
        ]

    kept = await offbook.gather_trajectory_groups(groups(), after_each=after, max_exceptions=1)
    assert [group.metadata["kind"] for group in kept] == ["same", "two", "two"]
    with pytest.raises(RolloutError, match="the judge failed"):
        await offbook.gather_trajectory_groups(groups(), after_each=after)


async def test_groups_may_come_from_coroutines_and_trajectories_from_a_flat_list() -> None:
    async def group() -> offbook.TrajectoryGroup:
        return offbook.TrajectoryGroup([scored(1), offbook.Trajectory(reward=2), KeyError("gone")])

    [found] = await offbook.gather_trajectory_groups([group()])
    assert sorted(t.reward or 0 for t in found) == [1, 2]
    assert [error.type for error in found.exceptions] == ["KeyError"]
    assert [
        t.reward for t in await offbook.gather_trajectories([scored(3), broken(), scored(4)], max_exceptions=1)
    ] == [
        3,
        4,
    ]


async def test_batches_come_in_order_while_the_next_one_is_already_running() -> None:
    started: list[int] = []

    async def noted(g: int) -> offbook.Trajectory:
        started.append(g)
        return offbook.Trajectory(reward=g)

    groups = (offbook.TrajectoryGroup([noted(g)]) for g in range(7))
    seen: list[list[float | None]] = []
    async for batch in offbook.trajectory_group_batches(groups, batch_size=2, prefetch=1):
        seen.append([group.trajectories[0].reward for group in batch])
        assert max(started) <= 2 * len(seen) + 1
    assert seen == [[0, 1], [2, 3], [4, 5], [6]]


async def test_leaving_the_batches_early_ends_what_was_prefetched() -> None:
    ended: list[bool] = []

    async def waiting() -> offbook.Trajectory:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        raise AssertionError

    batches = offbook.trajectory_group_batches(
        [offbook.TrajectoryGroup([scored(1)]), offbook.TrajectoryGroup([waiting()])], batch_size=1
    )
    await anext(batches)
    await asyncio.sleep(0)
    await batches.aclose()
    assert ended == [True]


def test_a_saved_group_comes_back_as_it_was() -> None:
    group = offbook.TrajectoryGroup(
        [offbook.Trajectory(reward=1), ValueError("x")], metadata={"a": 1}, metrics={"m": 2.0}
    )
    assert offbook.TrajectoryGroup.model_validate_json(group.model_dump_json()) == group


async def test_why_rollouts_failed_is_logged_by_kind_for_a_reader_of_the_bar(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def lost(name: str) -> offbook.Trajectory:
        raise KeyError(name)

    def group() -> offbook.TrajectoryGroup:
        return offbook.TrajectoryGroup(
            [lost("city"), lost("town"), broken("no luck"), broken("no luck"), broken("no luck")]
        )

    await offbook.gather_trajectory_groups([group()], max_exceptions=9, pbar_desc=None)
    assert caplog.messages == []
    await offbook.gather_trajectory_groups([group()], max_exceptions=9, pbar_desc="rollouts")
    [line] = caplog.messages
    assert re.fullmatch(
        r"rollouts: 5 of 5 rollouts failed: 3 x ValueError: no luck at test_gather\.py:\d+; "
        r"2 x KeyError: … at test_gather\.py:\d+",
        line,
    )


async def test_groups_that_after_each_drops_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def judge(group: offbook.TrajectoryGroup) -> offbook.TrajectoryGroup | None:
        return None if group.metadata["number"] else group

    groups = [offbook.TrajectoryGroup([scored(1)], metadata={"number": number}) for number in range(3)]
    assert len(await offbook.gather_trajectory_groups(groups, pbar_desc=None, after_each=judge)) == 1
    assert caplog.messages == ["after_each dropped 2 of 3 groups: it returned nothing for them"]


def test_messages_that_differ_in_values_only_are_one_kind() -> None:
    def kinds(*messages: str) -> list[tuple[int, str]]:
        errors = [RolloutException(type="Error", message=message, traceback="") for message in messages]
        return [(kind.count, kind.message) for kind in failure_kinds(errors)]

    assert kinds("no 'a b' in box-12", "no 'c' in box-7", "no 'd' in bag-7") == [
        (2, "no … in box-…"),
        (1, "no 'd' in bag-7"),
    ]
    assert kinds("the city doesn't exist, can't go", "the city doesn't exist, won't go") == [
        (1, "the city doesn't exist, can't go"),
        (1, "the city doesn't exist, won't go"),
    ]
    assert kinds('bad {"a": 1}', 'bad {"b": [2, 3]}', "bad {}") == [(3, "bad …")]
    assert kinds("<Task at 0x7f3a>", "<Task at 0x7f3b>") == [(2, "<Task at …>")]
    assert kinds("run 4f1c09ab77de", "run 0b1c09ab77df") == [(2, "run …")]
    assert kinds("[Errno 2] gone", "[Errno 2] gone") == [(2, "[Errno 2] gone")]


def test_kinds_beyond_the_first_are_counted_and_tracebacks_end_at_the_apps_line() -> None:
    kinds = [
        FailureKind("Error", name, count=count) for name, count in (("a", 4), ("b", 3), ("c", 2), ("d", 1), ("e", 1))
    ]
    assert summary(kinds) == "4 x Error: a; 3 x Error: b; 2 x Error: c; 2 more of 2 other kinds"

    def parse() -> None:
        json.loads("{")  # fails inside of the standard library

    try:
        parse()
    except ValueError as error:
        [kind] = failure_kinds([as_rollout_exception(error)])
    lines = kind.traceback.splitlines()
    assert 'json.loads("{")' in lines[-3] and lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property")
    assert kind.place.startswith("test_gather.py:") and "decoder.py" not in kind.traceback
