"""Runs many rollouts concurrently, with timeouts, retries, progress and a limit on failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import TypeAlias, TypeVar, cast, overload

from pydantic import BaseModel

from offbook.base.errors import (
    BudgetExceeded,
    CaptureError,
    ConfigError,
    RolloutError,
)
from offbook.base.options import RunOptions, close_unstarted, option, takes
from offbook.base.sync_calls import gather_all
from offbook.base.types import (
    PendingRollout,
    RolloutException,
    RolloutPlace,
    Trajectory,
    TrajectoryGroup,
    as_rollout_exception,
    new_id,
)
from offbook.base.user_values import as_list
from offbook.client.connection.progress import RolloutBar

from .failures import details, failure_kinds, summary
from .records import make_recordable

logger = logging.getLogger("offbook")

# Called with a finished group; returns its replacement, several groups, or None to drop it.
AfterEach: TypeAlias = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]
PendingGroup: TypeAlias = TrajectoryGroup | Awaitable[TrajectoryGroup]
PendingGame: TypeAlias = Awaitable[Iterable[Trajectory]] | Callable[[], Awaitable[Iterable[Trajectory]]]
"""A rollout with several players, not started yet."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RolloutLimits(RunOptions):
    """The options of running rollouts. Raises ConfigError for a value out of range."""

    pbar_desc: str | None = option("gather", "label of the progress bar; None: no bar, and no line about failures")
    max_exceptions: float = option(
        0, "end with an error after more failures than this: a count, or below 1 a fraction of all rollouts"
    )
    max_metrics: int | None = option(None, "metrics shown beside the progress bar", shown_default="4")
    concurrency: int | None = option(None, "rollouts that run at the same time", shown_default="all")
    timeout: float | None = option(None, "time limit of each rollout, in seconds", shown_default="no limit")
    retries: int = option(0, "how often a failed rollout is repeated; the rollout must be a callable")

    def __post_init__(self) -> None:
        if self.max_exceptions < 0 or self.retries < 0 or (self.concurrency is not None and self.concurrency < 1):
            raise ConfigError(
                "max_exceptions and retries must be at least 0, concurrency at least 1 or None; got "
                f"{self.max_exceptions!r}, {self.retries!r}, {self.concurrency!r}"
            )
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"timeout must be above 0 seconds or None, got {self.timeout!r}")


@dataclass(frozen=True, kw_only=True)
class GatherOptions(RolloutLimits):
    """The options of gathering groups."""

    after_each: AfterEach | None = option(None, "replaces a finished group, splits it, or drops it by returning None")


@dataclass(frozen=True)
class GatherArguments(GatherOptions):
    """Run the rollouts of every group and return the groups in order."""

    groups: Iterable[PendingGroup]


@dataclass(frozen=True)
class BatchArguments(GatherOptions):
    """Yield gathered batches of `batch_size` groups, in order."""

    groups: Iterable[PendingGroup]
    _: KW_ONLY
    batch_size: int
    prefetch: int = option(1, "batches to run ahead while one is used")


@dataclass(frozen=True)
class RolloutArguments(RolloutLimits):
    """Run rollouts and return the trajectories of those that succeeded, in order."""

    rollouts: Iterable[PendingRollout]


@dataclass(frozen=True)
class GameArguments(RolloutLimits):
    """Run rollouts of several players and return the trajectories of those that succeeded, in order."""

    rollouts: Iterable[PendingGame]


@dataclass(frozen=True)
class AnyRolloutArguments(RolloutLimits):
    """Run rollouts and return the results of those that succeeded, in order."""

    rollouts: Iterable[PendingRollout] | Iterable[PendingGame]


@takes(GatherArguments, "gather_trajectory_groups")
async def gather_trajectory_groups(options: GatherArguments) -> list[TrajectoryGroup]:
    """Run the rollouts of every group and return the groups in order. Every group gets an id, every rollout its index.

    The exception of a failed rollout is appended to `group.exceptions`, and the other rollouts continue. More than
    `max_exceptions` failures (a count; below 1, a fraction of all rollouts) raise a RolloutError that lists the causes.
    A CaptureError or BudgetExceeded is raised at once, because all other rollouts would fail in the same way.

    `after_each` may replace a finished group, split it, or drop it by returning None. Dropped groups are logged; failures
    too, unless `pbar_desc` is None. At most `concurrency` rollouts run at once, each for at most `timeout` seconds. A failed
    rollout is run again up to `retries` times, which requires a callable. Raises ConfigError for an option out of range.
    """
    group_list = as_list(options.groups, "groups", "group")
    for index, group in enumerate(group_list):
        if not isinstance(group, TrajectoryGroup | Awaitable):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            close_unstarted(group_list)
            raise ConfigError(f"groups[{index}] is a {type(group).__name__}; expected a TrajectoryGroup of rollouts")
    pending = [len(group.pending) if isinstance(group, TrajectoryGroup) else 0 for group in group_list]
    runner = _Runner(sum(pending), options)
    try:
        for group in group_list:
            if isinstance(group, TrajectoryGroup):
                runner.adopt(group.pending)
        with runner.bar:
            gathered = await gather_all([_group(group, runner, options.after_each) for group in group_list])
    finally:
        runner.close()
        close_unstarted(group_list)
    runner.check_fraction()
    runner.tell(options.pbar_desc)
    if runner.dropped:
        logger.warning(
            "after_each dropped %d of %d groups: it returned nothing for them", runner.dropped, len(group_list)
        )
    return [group for kept in gathered for group in kept]


@overload
@takes(RolloutArguments, "gather_trajectories")
async def gather_trajectories(options: RolloutArguments) -> list[Trajectory]: ...
@overload
@takes(GameArguments, "gather_trajectories")
async def gather_trajectories(options: GameArguments) -> list[list[Trajectory]]: ...
@takes(AnyRolloutArguments, "gather_trajectories")
async def gather_trajectories(options: AnyRolloutArguments) -> list[Trajectory] | list[list[Trajectory]]:
    """Run rollouts and return the results of those that succeeded, in order.

    A result is a trajectory, or the list of its players' trajectories. Options and errors as in `gather_trajectory_groups`.
    """
    group = TrajectoryGroup(cast(Iterable[PendingRollout], options.rollouts))
    runner = _Runner(len(group.pending), options, several=True)
    try:
        runner.adopt(group.pending)
        with runner.bar:
            results = await gather_all([runner.run(rollout) for rollout in group.take_pending()])
    finally:
        runner.close()
    runner.check_fraction()
    runner.tell(options.pbar_desc)
    gathered = [result for result in results if not isinstance(result, RolloutException)]
    return cast(list[Trajectory], [*group.trajectories, *gathered])


@takes(BatchArguments, "trajectory_group_batches")
async def trajectory_group_batches(options: BatchArguments) -> AsyncGenerator[list[TrajectoryGroup]]:
    """Yield gathered batches of `batch_size` groups, in order. Up to `prefetch` further batches run in the meantime.

    `groups` is read lazily. `max_exceptions` and `concurrency` apply per batch. Closing the generator cancels what runs.
    """
    batch_size, prefetch = options.batch_size, options.prefetch
    if batch_size < 1 or prefetch < 0:
        close_unstarted([options.groups])
        raise ConfigError(f"batch_size must be at least 1 and prefetch at least 0, got {batch_size!r} and {prefetch!r}")
    source = iter(options.groups)
    running: list[asyncio.Task[list[TrajectoryGroup]]] = []
    try:
        while True:
            while len(running) <= prefetch and (batch := list(islice(source, batch_size))):
                gathering = gather_trajectory_groups(batch, **options.passed_to(GatherOptions))
                running.append(asyncio.create_task(gathering))
            if not running:
                return
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        close_unstarted([options.groups])


class _Runner:
    """Runs the rollouts of one gathering: limits, progress bar and the failures so far."""

    def __init__(self, total: int, options: RolloutLimits, *, several: bool = False) -> None:
        """`several` allows a rollout to return the trajectories of several players."""
        self.bar = RolloutBar(options.pbar_desc, total or None, options.max_metrics)
        self._total = total
        self._max_exceptions = options.max_exceptions
        self._timeout = options.timeout
        self._retries = options.retries
        self._several = several
        self._slots: AbstractAsyncContextManager[object] = (
            nullcontext() if options.concurrency is None else asyncio.Semaphore(options.concurrency)
        )
        self._adopted: list[PendingRollout] = []
        self._failures: list[RolloutException] = []
        self.dropped = 0  # groups for which `after_each` returned nothing

    def adopt(self, pending: Sequence[PendingRollout]) -> None:
        """Take over rollouts. Raises ConfigError when retries are on and one of them can run only once."""
        self._adopted += pending
        if self._retries and any(isinstance(item, Awaitable) for item in pending):
            raise ConfigError(
                f"retries={self._retries} needs rollouts that can be run again: pass callables, such as "
                "TrajectoryGroup(lambda: rollout(model, scenario) for _ in range(8)), not coroutines"
            )

    def close(self) -> None:
        """Close coroutines that never started, so that Python does not warn about them."""
        close_unstarted(self._adopted)

    def expect(self, more: int) -> None:
        """Count rollouts that became known after the start."""
        self._total += more
        self.bar.expect(more)

    async def run(self, rollout: PendingRollout) -> Trajectory | list[Trajectory] | RolloutException:
        """Run one rollout, with retries. A failure is returned, not raised."""
        async with self._slots:
            for attempt in range(self._retries + 1):
                result = await self._once(rollout)
                if not isinstance(result, RolloutException):
                    trajectories = [result] if isinstance(result, Trajectory) else result
                    for trajectory in trajectories:
                        if trajectory.ended_at is None:
                            trajectory.finish()
                    self.bar.succeeded(trajectories)
                    return result
                if attempt == self._retries:
                    self.failed(result)
                    return result
        raise AssertionError("unreachable")

    async def _once(self, rollout: PendingRollout) -> Trajectory | list[Trajectory] | RolloutException:
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
            raise_common_fault(error)
            return as_rollout_exception(error)
        return self._checked(result)

    def _checked(self, result: object) -> Trajectory | list[Trajectory] | RolloutException:
        """Make what a rollout returned recordable; an invalid result becomes an exception."""
        trajectories = [result]
        if self._several and isinstance(result, Iterable) and not isinstance(result, BaseModel | str):
            trajectories = list(cast(Iterable[object], result))
        for trajectory in trajectories:
            if not isinstance(trajectory, Trajectory):
                message = f"the rollout returned {result!r:.200}; it must return a Trajectory"
                return as_rollout_exception(RolloutError(message))
            try:  # the progress bar and means need plain numbers
                make_recordable(trajectory)
            except ConfigError as error:
                return as_rollout_exception(RolloutError(f"the rollout returned what cannot be recorded: {error}"))
        return result if isinstance(result, Trajectory) else cast(list[Trajectory], trajectories)

    def failed(self, error: RolloutException) -> None:
        """Count a failure. Raises RolloutError when a limit given as a count is exceeded."""
        self._failures.append(error)
        self.bar.failed()
        if self._max_exceptions >= 1 or self._max_exceptions == 0:
            self._check_limit(self._max_exceptions)

    def tell(self, pbar_desc: str | None) -> None:
        """Log why rollouts failed, unless the progress bar is off."""
        if self._failures and pbar_desc is not None:
            kinds = failure_kinds(self._failures)
            logger.warning(
                "%s: %d of %d rollouts failed: %s", pbar_desc, len(self._failures), self._total, summary(kinds)
            )

    def check_fraction(self) -> None:
        """Check a limit given as a fraction, once the number of all rollouts is known. Raises RolloutError."""
        if 0 < self._max_exceptions < 1:
            self._check_limit(self._max_exceptions * self._total)

    def _check_limit(self, limit: float) -> None:
        if len(self._failures) <= limit:
            return
        raise RolloutError(
            f"{len(self._failures)} of {self._total or 'the'} rollouts failed, more than "
            f"max_exceptions={self._max_exceptions!r} allows: {details(failure_kinds(self._failures))}"
        )


async def _group(source: PendingGroup, runner: _Runner, after_each: AfterEach | None) -> list[TrajectoryGroup]:
    if isinstance(source, TrajectoryGroup):
        group = source
    else:
        try:
            group = await source
        except Exception as error:  # noqa: BLE001  # counted like a failed rollout
            raise_common_fault(error)
            runner.failed(as_rollout_exception(error))
            return []
        if not isinstance(group, TrajectoryGroup):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
            raise RolloutError(f"groups: a coroutine returned {group!r:.200}; it must return a TrajectoryGroup")
        runner.adopt(group.pending)
        runner.expect(len(group.pending))
    group.place = group.place.filled(RolloutPlace(group=new_id("group")))
    for number, trajectory in enumerate(group.trajectories):
        trajectory.place = trajectory.place.filled(group.place, number)
    first_index = len(group.trajectories) + len(group.exceptions)
    results = await gather_all([runner.run(rollout) for rollout in group.take_pending()])
    for number, result in enumerate(results, first_index):
        if isinstance(result, Trajectory):
            result.place = result.place.filled(group.place, number)
            group.trajectories.append(result)
        elif isinstance(result, RolloutException):
            group.exceptions.append(result)
    if after_each is None:
        return [group]
    try:
        kept = await after_each(group)
    except Exception as error:  # noqa: BLE001  # a failed judge drops its group and counts as a failed rollout
        raise_common_fault(error)
        runner.failed(as_rollout_exception(error))
        return []
    groups = [] if kept is None else [kept] if isinstance(kept, TrajectoryGroup) else list(kept)
    runner.dropped += not groups
    return groups


def raise_common_fault(error: Exception) -> None:
    """Re-raise an error that every rollout would have: CaptureError or BudgetExceeded, also inside an ExceptionGroup.

    Returns for any other exception.
    """
    if isinstance(error, ExceptionGroup):
        for inner in cast("ExceptionGroup[Exception]", error).exceptions:
            raise_common_fault(inner)
    if isinstance(error, CaptureError | BudgetExceeded):
        raise error
