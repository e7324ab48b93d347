"""Judges: checked before the first rollout, asked twice at most, and believed only in numbers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from understudy.contracts import Judge
from understudy.errors import BudgetExceeded, CaptureError, ConfigError, LlmError, MissingExtraError
from understudy.rewards.outcome import as_reward
from understudy.types import TrajectoryGroup

log = logging.getLogger("understudy")

DROPPED = "judge/dropped"
"""Metric of a group: 1 where the judge gave no scores."""
WANTED = "async def judge(group: TrajectoryGroup) -> TrajectoryGroup | None"
SAME_FAULT_AGAIN = (BudgetExceeded, CaptureError, ConfigError, MissingExtraError)
"""What a judge raises for every group alike: asking again, or going on without it, is of no use."""


def check_judge(judge: object) -> None:
    """Raise ConfigError for what cannot be awaited with one group. What a lambda gives is seen when it is asked."""
    fault = _fault(judge)
    if fault is not None:
        raise ConfigError(
            f"judge: got {type(judge).__name__} {judge!r:.200}{fault}; {WANTED} is needed, which gives the group with "
            "rewards (None drops it)"
        )


def _fault(judge: object) -> str | None:
    if not callable(judge):
        return ""
    if isinstance(judge, type):
        return ", a class: pass an instance"
    function = _function(judge)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return ", a generator"
    if inspect.isfunction(function) and function.__name__ != "<lambda>" and not inspect.iscoroutinefunction(function):
        return ", which is not async"
    try:
        signature = inspect.signature(judge)
    except ValueError:  # one that tells no signature is seen when it is asked
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        return f", which cannot be called with one group ({error})"
    return None


def _function(judge: Callable[..., object]) -> object:
    """The function that is run in the end: of a partial, a method, an object, or under decorators that tell."""
    found: object = judge
    while isinstance(found, functools.partial):
        found = cast("functools.partial[object]", found).func
    if not (inspect.isroutine(found) or inspect.iscoroutinefunction(found)):
        found = found.__call__  # type: ignore[operator]  # an object with a method for it
    return inspect.unwrap(cast(Callable[..., object], getattr(found, "__func__", found)))


async def judged(groups: Sequence[TrajectoryGroup], judge: Judge) -> list[TrajectoryGroup]:
    """The groups with the judge's rewards; a failed rollout stays unscored, and a group of failed rollouts is not shown.
    A group whose judge fails twice or gives None is dropped: its rollouts become unscored, and say why; the metric
    `judge/dropped` counts it. Raises ConfigError for a judge that returns something else, and what ends the run."""
    answers = await asyncio.gather(*(_asked_twice(group, judge) for group in groups), return_exceptions=True)
    kept: list[TrajectoryGroup] = []
    for group, answer in zip(groups, answers, strict=True):
        if isinstance(answer, BaseException) and (not isinstance(answer, Exception) or _is_common(answer)):
            raise answer
        if isinstance(answer, TrajectoryGroup):
            answer.place = answer.place.filled(group.place)
            answer.metrics[DROPPED] = 0.0
        kept.append(answer if isinstance(answer, TrajectoryGroup) else _dropped(group, answer))
    return kept


def _is_common(error: Exception) -> bool:
    """Whether every group's judge fails alike."""
    return isinstance(error, SAME_FAULT_AGAIN) or (isinstance(error, LlmError) and error.lasting)


async def _asked_twice(group: TrajectoryGroup, judge: Judge) -> TrajectoryGroup | None:
    if all(trajectory.exception is not None for trajectory in group):
        return group
    try:
        return await _asked(group, judge)
    except (*SAME_FAULT_AGAIN, LlmError):  # an LlmError comes after the retries that make sense
        raise
    except Exception:  # whatever it was, a judge is asked once more
        log.warning("the judge failed and is asked again", exc_info=True)
    return await _asked(group, judge)


async def _asked(group: TrajectoryGroup, judge: Judge) -> TrajectoryGroup | None:
    """The judge's answer, its rewards as plain numbers. Raises RolloutError for a reward that is no number."""
    given: object = judge(group)
    answer: object = await cast(Awaitable[object], given) if inspect.isawaitable(given) else given
    if given is answer or not isinstance(answer, TrajectoryGroup | None):
        raise ConfigError(
            f"judge: {getattr(judge, '__qualname__', repr(judge))} returned {type(answer).__name__} {answer!r:.200}, "
            f"{'without being awaited' if given is answer else 'which is no group'}; needed is {WANTED}"
        )
    for trajectory in answer or ():
        if trajectory.exception is not None:
            trajectory.reward = None
        elif trajectory.reward is not None:
            trajectory.reward = as_reward(trajectory.reward, f"the judge (trajectory {trajectory.id})").reward
    return answer


def _dropped(group: TrajectoryGroup, failure: Exception | BaseException | None) -> TrajectoryGroup:
    why = "the judge gave no scores" if failure is None else f"the judge failed: {failure!r}"
    for trajectory in group:
        trajectory.reward = None
        trajectory.log(why)
    group.metrics[DROPPED] = 1.0
    group.logs.append(why)
    return group
