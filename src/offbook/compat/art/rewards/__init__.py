"""Stands for `art.rewards`."""

from ..modules import names_in
from .ruler import ruler, ruler_score_group

__all__ = ["ruler", "ruler_score_group"]

__getattr__ = names_in(__name__)
