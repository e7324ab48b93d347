"""Stands for `art.rewards.ruler`."""

from ....rewards import DEFAULT_RUBRIC, ruler, ruler_score_group
from ..modules import names_in

__all__ = ["DEFAULT_RUBRIC", "ruler", "ruler_score_group"]

__getattr__ = names_in(__name__)
