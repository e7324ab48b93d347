"""What a reward function may return, as one thing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, cast

from understudy.client.records import LARGEST_NUMBER
from understudy.errors import RolloutError


class Scalar(Protocol):
    """A scalar of numpy or torch: an array without dimensions."""

    def item(self) -> object: ...


@dataclass(frozen=True)
class RewardResult:
    """A reward, and metrics to be shown beside it."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def as_reward(value: object, source: str) -> RewardResult:
    """A number, a mapping of numbers with `reward`, or a RewardResult -> plain floats. A number is also a bool, or a
    scalar of numpy or torch. Raises RolloutError naming `source` for anything else."""
    if isinstance(value, RewardResult):
        reward = _number(value.reward, f"{source}: RewardResult.reward")
        return RewardResult(reward, _numbers(value.metrics, f"{source}: RewardResult.metrics"))
    if isinstance(value, Mapping):
        named = _numbers(cast(object, value), source)
        if "reward" not in named:
            raise RolloutError(f"{source} gave a dict without `reward`; its keys are {', '.join(named) or '(none)'}")
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
        raise RolloutError(f"{source} gave {type(value).__name__}, which is no float: {error}") from error
    if number is None:
        raise RolloutError(f"{source} gave {type(value).__name__} {value!r:.200}; a number is needed")
    if not math.isfinite(number):
        raise RolloutError(f"{source} gave {value!r}; a finite number is needed (None: unscored)")
    if abs(number) > LARGEST_NUMBER:
        raise RolloutError(f"{source} gave {value!r}; a number within +-{LARGEST_NUMBER:g} is needed: scale it")
    return number
