"""Runs the same app on the same scenarios with several models, and reports what differs."""

from .comparison import acompare, compare
from .results import ComparisonReport

__all__ = ["ComparisonReport", "acompare", "compare"]
