"""Stands for `art.rewards`."""

from ...rewards.ruler_judge import ruler, ruler_score_group

__all__ = ["ruler", "ruler_score_group"]
