"""Calls judges on groups. A judge is checked before the first rollout, called at most twice per group, and must return
finite rewards."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Sequence
from typing import cast

from offbook.base.errors import (
    BudgetExceeded,
    CaptureError,
    ConfigError,
    LlmError,
    MissingExtraError,
    RolloutError,
)
from offbook.base.redaction import error_text
from offbook.base.text import counted
from offbook.base.types import TrajectoryGroup, as_rollout_exception
from offbook.contracts import Judge
from offbook.llms import Llm
from offbook.rewards.reward_result import as_reward

logger = logging.getLogger("offbook")

DROPPED = "judge/dropped"
"""Metric of a group: 1 if the judge returned no scores, else 0."""
WANTED = "async def judge(group: TrajectoryGroup) -> TrajectoryGroup | None"
SAME_FAULT_AGAIN = (BudgetExceeded, CaptureError, ConfigError, MissingExtraError)
"""Errors that a judge would raise for every group: they end the run without a retry."""


def check_judge(judge: object) -> None:
    """Raise ConfigError unless `judge` is an async function of one group. The result of a lambda or a callable object is checked
    when it is called."""
    if isinstance(judge, str | Llm):
        raise ConfigError(f"judge: {judge!r} is a model: write judge=offbook.Ruler({judge!r})")
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
    function = inspect.unwrap(judge)
    if inspect.isroutine(function) and function.__name__ != "<lambda>" and not inspect.iscoroutinefunction(function):
        return ", which is not async"
    return None


async def judged(groups: Sequence[TrajectoryGroup], judge: Judge) -> list[TrajectoryGroup]:
    """The groups with the judge's rewards. Failed rollouts stay unscored; a group with only failed rollouts is not
    judged.

    If the judge fails twice or returns None, the group is dropped: its rollouts become unscored, their logs name the
    reason, and its metric `judge/dropped` is 1. Raises ConfigError if the judge returns another type, and the errors
    of `SAME_FAULT_AGAIN`."""
    answers = await asyncio.gather(*(_call_twice(group, judge) for group in groups), return_exceptions=True)
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
    return isinstance(error, SAME_FAULT_AGAIN) or (isinstance(error, LlmError) and error.lasting)


async def _call_twice(group: TrajectoryGroup, judge: Judge) -> TrajectoryGroup | None:
    if all(trajectory.exception is not None for trajectory in group):
        return group
    try:
        return await _call(group, judge)
    except (*SAME_FAULT_AGAIN, LlmError):  # an LlmError comes after its own retries
        raise
    except Exception as error:  # noqa: BLE001  # any failure of the judge is retried once
        logger.warning("the judge failed and is called again:\n%s", as_rollout_exception(error).traceback)
    return await _call(group, judge)


async def _call(group: TrajectoryGroup, judge: Judge) -> TrajectoryGroup | None:
    """Call the judge. Returns its group with rewards as floats. Raises RolloutError for a reward that is no number."""
    result: object = judge(group)
    answer: object = await cast(Awaitable[object], result) if inspect.isawaitable(result) else result
    if result is answer or not isinstance(answer, TrajectoryGroup | None):
        raise ConfigError(
            f"judge: {getattr(judge, '__qualname__', repr(judge))} returned {type(answer).__name__} {answer!r:.200}, "
            f"{'without being awaited' if result is answer else 'which is not a group'}; needed is {WANTED}"
        )
    for trajectory in answer or ():
        if trajectory.exception is not None:
            trajectory.reward = None
        elif trajectory.reward is not None:
            trajectory.reward = as_reward(trajectory.reward, f"the judge (trajectory {trajectory.id})").reward
    return answer


def nothing_scored(groups: Sequence[TrajectoryGroup]) -> RolloutError:
    """The error for groups of stored rollouts, all of which the judge dropped."""
    why = next((line for group in groups for line in group.logs), "the judge gave no scores")
    return RolloutError(
        f"judge: none of {counted(len(groups), 'group')} was scored, the first because {why}. The rollouts are kept: run it "
        "again, or with another judge"
    )


def _dropped(group: TrajectoryGroup, failure: Exception | BaseException | None) -> TrajectoryGroup:
    why = "the judge gave no scores" if failure is None else f"the judge failed: {error_text(failure)}"
    for trajectory in group:
        trajectory.reward = None
        trajectory.log(why)
    group.metrics[DROPPED] = 1.0
    group.logs.append(why)
    return group
