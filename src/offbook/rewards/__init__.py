"""Rewards: conversion of a rollout's return value, functions to compute a reward, and judges. Names are loaded
lazily."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .judge_chains import AverageJudge, GateJudge, TieJudge
    from .judge_prompt import DEFAULT_RUBRIC
    from .reward_parts import (
        clipped,
        exact_match,
        fuzzy_match,
        gated,
        json_valid,
        length_penalty,
        numeric_match,
        tool_call_penalty,
        tool_calls,
        weighted,
    )
    from .reward_result import RewardResult
    from .rubric import write_rubric
    from .ruler_judge import Ruler, TrajectoryScore, ruler, ruler_score_group

__all__ = [
    "DEFAULT_RUBRIC",
    "AverageJudge",
    "GateJudge",
    "RewardResult",
    "Ruler",
    "TieJudge",
    "TrajectoryScore",
    "clipped",
    "exact_match",
    "fuzzy_match",
    "gated",
    "json_valid",
    "length_penalty",
    "numeric_match",
    "ruler",
    "ruler_score_group",
    "tool_call_penalty",
    "tool_calls",
    "weighted",
    "write_rubric",
]

_MODULE_OF = {
    "AverageJudge": "judge_chains",
    "DEFAULT_RUBRIC": "judge_prompt",
    "GateJudge": "judge_chains",
    "RewardResult": "reward_result",
    "Ruler": "ruler_judge",
    "TieJudge": "judge_chains",
    "TrajectoryScore": "ruler_judge",
    "clipped": "reward_parts",
    "exact_match": "reward_parts",
    "fuzzy_match": "reward_parts",
    "gated": "reward_parts",
    "json_valid": "reward_parts",
    "length_penalty": "reward_parts",
    "numeric_match": "reward_parts",
    "ruler": "ruler_judge",
    "ruler_score_group": "ruler_judge",
    "tool_call_penalty": "reward_parts",
    "tool_calls": "reward_parts",
    "weighted": "reward_parts",
    "write_rubric": "rubric",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
