"""Many rollouts at once: concurrency, timeouts, retries, progress, and what may fail."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import islice
from typing import TypeAlias, TypeVar, cast

from ..errors import CaptureError, ConfigError, RolloutError
from ..types import (
    PendingRollout,
    RolloutException,
    RolloutPlace,
    Trajectory,
    TrajectoryGroup,
    as_rollout_exception,
    new_id,
)
from .progress import RolloutBar
from .records import as_numbers

AfterEach: TypeAlias = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]
PendingGroup: TypeAlias = TrajectoryGroup | Awaitable[TrajectoryGroup]
Result = TypeVar("Result")


async def gather_trajectory_groups(
    groups: Iterable[PendingGroup],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
) -> list[TrajectoryGroup]:
    """Run the rollouts of every group and return the groups, in order. Each group has an id then, and each rollout its index.

    A failed rollout leaves its exception in `group.exceptions`; the others go on. More than `max_exceptions` of them (a
    count, or below 1 a fraction of all) end everything with a RolloutError that lists the causes; a CaptureError ends
    everything at once, since every other rollout has the same fault. `after_each` may replace a finished group, split it,
    or drop it (None). At most `concurrency` rollouts run at once, each for at most `timeout` seconds; one that fails is
    run again up to `retries` times, for which it must be a callable.
    """
    found = list(groups)
    for at, group in enumerate(found):
        if not isinstance(group, TrajectoryGroup | Awaitable):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"groups[{at}] is a {type(group).__name__}; expected a TrajectoryGroup of rollouts")
    pending = [len(group.pending) if isinstance(group, TrajectoryGroup) else 0 for group in found]
    runner = _Runner(sum(pending), pbar_desc, max_exceptions, max_metrics, concurrency, timeout, retries)
    try:
        for group in found:
            if isinstance(group, TrajectoryGroup):
                runner.adopt(group.pending)
        with runner.bar:
            gathered = await _all([_group(group, runner, after_each) for group in found])
    finally:
        runner.close()
    runner.check_fraction()
    return [group for kept in gathered for group in kept]


async def gather_trajectories(
    rollouts: Iterable[PendingRollout],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
) -> list[Trajectory]:
    """Run rollouts and return the trajectories of those that succeeded, in order; options as for groups."""
    group = TrajectoryGroup(rollouts)
    [gathered] = await gather_trajectory_groups(
        [group],
        pbar_desc=pbar_desc,
        max_exceptions=max_exceptions,
        max_metrics=max_metrics,
        concurrency=concurrency,
        timeout=timeout,
        retries=retries,
    )
    for trajectory in gathered.trajectories:  # side by side, and yet compared with nothing
        if trajectory.place.group == gathered.place.group:
            trajectory.place = trajectory.place.model_copy(update={"group": None, "index": None})
    return gathered.trajectories


async def trajectory_group_batches(
    groups: Iterable[PendingGroup],
    *,
    batch_size: int,
    prefetch: int = 1,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    after_each: AfterEach | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
) -> AsyncGenerator[list[TrajectoryGroup]]:
    """Gathered batches of `batch_size` groups, in order; up to `prefetch` more are running while one is used.

    `groups` is read lazily. `max_exceptions` and `concurrency` hold per batch.
    """
    if batch_size < 1 or prefetch < 0:
        raise ConfigError(f"batch_size must be at least 1 and prefetch at least 0, got {batch_size!r} and {prefetch!r}")
    source = iter(groups)
    running: list[asyncio.Task[list[TrajectoryGroup]]] = []
    try:
        while True:
            while len(running) <= prefetch and (batch := list(islice(source, batch_size))):
                gathering = gather_trajectory_groups(
                    batch,
                    pbar_desc=pbar_desc,
                    max_exceptions=max_exceptions,
                    after_each=after_each,
                    concurrency=concurrency,
                    timeout=timeout,
                    retries=retries,
                )
                running.append(asyncio.create_task(gathering))
            if not running:
                return
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Runner:
    """What the rollouts of one gathering share."""

    def __init__(
        self,
        total: int,
        pbar_desc: str | None,
        max_exceptions: float,
        max_metrics: int | None,
        concurrency: int | None,
        timeout: float | None,
        retries: int,
    ) -> None:
        if max_exceptions < 0 or retries < 0 or (concurrency is not None and concurrency < 1):
            raise ConfigError(
                "max_exceptions and retries must be at least 0, concurrency at least 1 or None; got "
                f"{max_exceptions!r}, {retries!r}, {concurrency!r}"
            )
        if timeout is not None and timeout <= 0:
            raise ConfigError(f"timeout must be above 0 seconds or None, got {timeout!r}")
        self.bar = RolloutBar(pbar_desc, total or None, max_metrics)
        self._total = total
        self._max_exceptions = max_exceptions
        self._timeout = timeout
        self._retries = retries
        self._places: AbstractAsyncContextManager[object] = (
            nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        )
        self._adopted: list[PendingRollout] = []
        self._failures: list[RolloutException] = []

    def adopt(self, pending: Sequence[PendingRollout]) -> None:
        """Take rollouts over; refuses retries of what can run only once."""
        self._adopted += pending
        if self._retries and any(isinstance(item, Awaitable) for item in pending):
            raise ConfigError(
                f"retries={self._retries} needs rollouts that can be run again: pass callables, such as "
                "TrajectoryGroup(lambda: rollout(model, scenario) for _ in range(8)), not coroutines"
            )

    def close(self) -> None:
        """End the coroutines that were never begun."""
        for rollout in self._adopted:
            if inspect.iscoroutine(rollout) and inspect.getcoroutinestate(rollout) == inspect.CORO_CREATED:
                rollout.close()

    def expect(self, more: int) -> None:
        """Rollouts that became known after the start."""
        self._total += more
        self.bar.expect(more)

    async def run(self, rollout: PendingRollout) -> Trajectory | RolloutException:
        """Run one rollout, again when it fails and may be; its exception is a value."""
        async with self._places:
            for attempt in range(self._retries + 1):
                result = await self._once(rollout)
                if isinstance(result, Trajectory):
                    if result.ended_at is None:
                        result.finish()
                    self.bar.succeeded(result)
                    return result
                if attempt == self._retries:
                    self.failed(result)
                    return result
        raise AssertionError("unreachable")

    async def _once(self, rollout: PendingRollout) -> Trajectory | RolloutException:
        task = asyncio.current_task()
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                waiting = cast(Awaitable[Trajectory], rollout if isinstance(rollout, Awaitable) else rollout())
                result = await waiting
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            return as_rollout_exception(RolloutError(f"the rollout was cancelled from inside: {error!r}"))
        except TimeoutError as error:
            if not limit.expired():
                return as_rollout_exception(error)
            late = TimeoutError(f"the rollout took longer than timeout={self._timeout} s")
            late.__cause__ = error
            return as_rollout_exception(late)
        except Exception as error:  # noqa: BLE001  # a bad rollout is data, not a crash
            raise_capture_fault(error)
            return as_rollout_exception(error)
        if not isinstance(result, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
            return as_rollout_exception(
                RolloutError(f"the rollout returned {result!r:.200}; it must return a Trajectory")
            )
        try:  # before the bar or a mean would stumble over them
            _make_plain(result)
        except ConfigError as error:
            return as_rollout_exception(RolloutError(f"the rollout returned a trajectory of which {error}"))
        return result

    def failed(self, error: RolloutException) -> None:
        """Count a failure; raises RolloutError beyond the limit."""
        self._failures.append(error)
        self.bar.failed()
        if self._max_exceptions >= 1 or self._max_exceptions == 0:
            self._check_limit(self._max_exceptions)

    def check_fraction(self) -> None:
        """Hold the limit that is a fraction of all, when all are known."""
        if 0 < self._max_exceptions < 1:
            self._check_limit(self._max_exceptions * self._total)

    def _check_limit(self, limit: float) -> None:
        if len(self._failures) <= limit:
            return
        causes = Counter(f"{error.type}: {error.message}"[:500] for error in self._failures)
        lines = [f"  {count} x {cause}" for cause, count in causes.most_common(10)]
        raise RolloutError(
            f"{len(self._failures)} of {self._total or 'the'} rollouts failed, more than "
            f"max_exceptions={self._max_exceptions!r} allows:\n" + "\n".join(lines) + f"\n{self._failures[0].traceback}"
        )


async def _group(source: PendingGroup, runner: _Runner, after_each: AfterEach | None) -> list[TrajectoryGroup]:
    if isinstance(source, TrajectoryGroup):
        group = source
    else:
        try:
            group = await source
        except Exception as error:  # noqa: BLE001  # counted like a failed rollout
            raise_capture_fault(error)
            runner.failed(as_rollout_exception(error))
            return []
        if not isinstance(group, TrajectoryGroup):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
            raise RolloutError(f"groups: a coroutine returned {group!r:.200}; it must return a TrajectoryGroup")
        runner.adopt(group.pending)
        runner.expect(len(group.pending))
    group.place = group.place.filled(RolloutPlace(group=new_id("group")))
    for number, trajectory in enumerate(group.trajectories):
        trajectory.place = trajectory.place.filled(group.place, number)
    before = len(group.trajectories) + len(group.exceptions)
    results = await _all([runner.run(rollout) for rollout in group.take_pending()])
    for number, result in enumerate(results, before):
        if isinstance(result, Trajectory):
            result.place = result.place.filled(group.place, number)
            group.trajectories.append(result)
        else:
            group.exceptions.append(result)
    if after_each is None:
        return [group]
    try:
        kept = await after_each(group)
    except Exception as error:  # noqa: BLE001  # a judge that fails drops its group, counted like a failed rollout
        raise_capture_fault(error)
        runner.failed(as_rollout_exception(error))
        return []
    return [] if kept is None else [kept] if isinstance(kept, TrajectoryGroup) else list(kept)


def _make_plain(trajectory: Trajectory) -> None:
    """Reward and metrics as plain finite numbers, also where they were scalars of numpy or torch. Raises ConfigError."""
    found = as_numbers(trajectory.metrics, "metrics")
    if trajectory.reward is not None:
        trajectory.reward = as_numbers({"reward": trajectory.reward}, "the trajectory")["reward"]
        _check_finite(trajectory.reward, "the trajectory['reward']")
    for name, value in found.items():
        _check_finite(value, f"metrics[{name!r}]")
        if not isinstance(trajectory.metrics[name], int | float):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            trajectory.metrics[name] = value


def _check_finite(value: float, where: str) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{where} must be a finite number, got {value!r}")


def raise_capture_fault(error: Exception) -> None:
    """Raise the CaptureError that this is, or that a task group hands on; return for any other exception."""
    if isinstance(error, ExceptionGroup):
        for inner in cast("ExceptionGroup[Exception]", error).exceptions:
            raise_capture_fault(inner)
    if isinstance(error, CaptureError):
        raise error


async def _all(jobs: Sequence[Awaitable[Result]]) -> list[Result]:
    """Await all; the first exception cancels the others, waits for them to end, and is raised as it is."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
