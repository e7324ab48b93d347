"""Converts the values that a reward function may return to a RewardResult."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, cast

from offbook.base.errors import RolloutError
from offbook.client.rollouts.records import LARGEST_NUMBER


class Scalar(Protocol):
    """A scalar of numpy or torch: an array of shape ()."""

    def item(self) -> object:
        """The value as a Python number."""
        ...


@dataclass(frozen=True)
class RewardResult:
    """A reward, and metrics to log with it."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def as_reward(value: object, source: str) -> RewardResult:
    """Convert a number, a mapping of numbers with the key `reward`, or a RewardResult to plain floats.

    Numbers may be bools, and scalars of numpy or torch. Raises RolloutError, which names `source`, for other values and
    for numbers that are not finite.

    >>> as_reward({"reward": True, "steps": 3}, "reward=")
    RewardResult(reward=1.0, metrics={'steps': 3.0})
    """
    if isinstance(value, RewardResult):
        reward = _number(value.reward, f"{source}: RewardResult.reward")
        return RewardResult(reward, _numbers(value.metrics, f"{source}: RewardResult.metrics"))
    if isinstance(value, Mapping):
        keys = [str(key) for key in cast(Mapping[object, object], value)]
        if "reward" not in keys:
            raise RolloutError(f"{source} gave a dict without `reward`; its keys are {', '.join(keys) or '(none)'}")
        named = _numbers(cast(object, value), source)
        return RewardResult(named.pop("reward"), named)
    return RewardResult(_number(value, source))


def _numbers(values: object, source: str) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise RolloutError(f"{source} gave {type(values).__name__} {values!r:.200}; a dict of numbers is needed")
    named = cast(Mapping[object, object], values)
    return {str(key): _number(item, f"{source}[{key!r}]") for key, item in named.items()}


def _number(value: object, source: str) -> float:
    shape: object = getattr(value, "shape", None)
    try:
        plain = cast(Scalar, value).item() if shape == () else value
        number = float(plain) if isinstance(plain, SupportsFloat) and shape in (None, ()) else None
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # too large; torch: a tensor without data
        raise RolloutError(f"{source} gave {type(value).__name__}, which is not a float: {error}") from error
    if number is None:
        raise RolloutError(f"{source} gave {type(value).__name__} {value!r:.200}; a number is needed")
    if not math.isfinite(number):
        raise RolloutError(f"{source} gave {value!r}; a finite number is needed (None: unscored)")
    if abs(number) > LARGEST_NUMBER:
        raise RolloutError(f"{source} gave {value!r}; a number within +-{LARGEST_NUMBER:g} is needed: scale it")
    return number
