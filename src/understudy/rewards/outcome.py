"""What a reward function may return, as one thing."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from understudy.errors import RolloutError


@dataclass(frozen=True)
class RewardResult:
    """A reward, and metrics to be shown beside it."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def as_reward(value: object, source: str) -> RewardResult:
    """A number, a mapping of numbers with `reward`, or a RewardResult. Raises RolloutError naming `source` otherwise."""
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, Mapping):
        named = {
            str(key): _number(item, f"{source}[{key!r}]") for key, item in cast(Mapping[object, object], value).items()
        }
        if "reward" not in named:
            raise RolloutError(f"{source} gave a dict without `reward`; its keys are {', '.join(named) or '(none)'}")
        return RewardResult(named.pop("reward"), named)
    return RewardResult(_number(value, source))


def _number(value: object, source: str) -> float:
    if not isinstance(value, numbers.Real):
        raise RolloutError(f"{source} gave {type(value).__name__} {value!r}; a number is needed")
    if not math.isfinite(value):
        raise RolloutError(f"{source} gave {value!r}; a finite number is needed (None: unscored)")
    return float(value)
