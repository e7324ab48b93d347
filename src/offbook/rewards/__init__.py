"""Rewards: conversion of a rollout's return value, functions to compute a reward, and judges."""

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
