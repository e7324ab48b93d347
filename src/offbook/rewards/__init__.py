"""Rewards: conversion of a rollout's return value, functions to compute a reward, and judges. Names are loaded
lazily."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .judge_prompt import DEFAULT_RUBRIC
    from .reward_parts import exact_match, gated, json_valid, numeric_match, weighted
    from .reward_result import RewardResult
    from .rubric import write_rubric
    from .ruler_judge import Ruler, TrajectoryScore, ruler, ruler_score_group

__all__ = [
    "DEFAULT_RUBRIC",
    "RewardResult",
    "Ruler",
    "TrajectoryScore",
    "exact_match",
    "gated",
    "json_valid",
    "numeric_match",
    "ruler",
    "ruler_score_group",
    "weighted",
    "write_rubric",
]

_MODULE_OF = {
    **dict.fromkeys(("Ruler", "TrajectoryScore", "ruler", "ruler_score_group"), "ruler_judge"),
    "DEFAULT_RUBRIC": "judge_prompt",
    "RewardResult": "reward_result",
    "write_rubric": "rubric",
}
"""Name -> its module, if that is not `reward_parts`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF.get(name, 'reward_parts')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
